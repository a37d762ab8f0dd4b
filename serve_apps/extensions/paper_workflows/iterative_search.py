"""iterative_search: plan, answer, then search, read, edit the thoughts, answer again (UnityMAS-O's M-ASK, arXiv 2605.26646)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

from serve_apps.authoring.agent import Agent, TracedText
from serve_apps.authoring.contracts import OneOf, Parsed, Tags
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.extensions.retrieval.retrieval import retriever_tool
from stores.settings import Count
from stores.types import Task

NO_EVIDENCE = "No useful information"
MAX_QUESTIONS = 5
_TAG = re.compile(r"<(/?)([qa])(\d{1,4})>")
_EDIT = re.compile(r"t(\d{1,4})(?!\d)\s*:?(.*)", re.DOTALL)


class Plan:
    """Requires a `<plan>` of one to five numbered pairs `<q1>question</q1><a1>answer</a1>`, no question twice, then
    `<final_answer>`."""

    field_names = ("plan", "final_answer")
    _tags = Tags("plan", "final_answer")

    def parse(self, text: str) -> Parsed:
        """Reads the two blocks; a plan of another form is a fault."""
        parsed = self._tags.parse(text)
        pairs, rest = _pairs(parsed.fields["plan"])
        questions = [pair.question for pair in pairs]
        fault = ""
        if not pairs or rest.strip():
            fault = "<plan> is not a row of <q1>question</q1><a1>answer</a1>"
        elif [pair.number for pair in pairs] != list(range(1, len(pairs) + 1)) or len(pairs) > MAX_QUESTIONS:
            fault = f"the questions of <plan> are not numbered from 1 to at most {MAX_QUESTIONS}"
        elif len({*questions}) < len(questions) or not all(pair.question and pair.answer for pair in pairs):
            fault = "a question of <plan> stands twice, or a pair is empty"
        return replace(parsed, fault=parsed.fault or fault)


class IterativeSearch(Workflow):
    """Runs five agents on a list of thoughts `t1: question -> answer`, which the updater edits.

    Summaries reach the search history of the next round, by the agents that wrote them.
    """

    planner = Agent(
        prompt=(
            "Split the question and answer what you know, else unkown. "
            "Reply with <plan><q1>question</q1><a1>answer</a1></plan><final_answer>answer</final_answer> only.\n"
            "Question: {question}"
        ),
        contract=Plan(),
    )
    answerer = Agent(
        prompt="Answer. Reply with <final_answer>answer</final_answer> only.\nThoughts:\n{thoughts}\nQuestion: {question}",
        contract=Tags("final_answer"),
        cut=("thoughts",),
    )
    searcher = Agent(
        prompt=(
            "Search, or end. Reply with <search>words</search> or <end></end> only.\n"
            "Found: {found}\nThoughts:\n{thoughts}\nQuestion: {question}"
        ),
        contract=OneOf("search", "end", may_be_empty=("end",)),
        cut=("found", "thoughts"),
    )
    summarizer = Agent(
        prompt=(
            "Summarize what helps in 75 words, or say No useful information. Reply with <evidence>summary</evidence> only.\n"
            "Documents: {documents}\nSearch: {search}\nQuestion: {question}"
        ),
        contract=Tags("evidence", max_words={"evidence": 75}),
        cut=("documents",),
    )
    updater = Agent(
        prompt=(
            "Change a thought or add one. Reply with <update>t1: thought</update> or <add>t2: thought</add> only.\n"
            "Evidence: {evidence}\nThoughts:\n{thoughts}\nQuestion: {question}"
        ),
        contract=OneOf("update", "add"),
        cut=("thoughts", "evidence"),
    )

    def __init__(
        self,
        max_rounds: Count = 3,
        top_k: Count = 5,
        stop_on_search_end: bool = True,
        retriever: dict[str, Any] | None = None,
    ) -> None:
        """Sets the workflow up.

        Args:
            max_rounds: searches at most.
            top_k: documents per search.
            stop_on_search_end: whether a searcher that does not search ends the episode; else it ends the round.
            retriever: where documents come from, see `serve_apps/extensions/retrieval/retrieval.py`.
        """
        self.max_rounds, self.stop_on_search_end = max_rounds, stop_on_search_end
        self.tools = {"retrieve": retriever_tool(retriever or {}, top_k=top_k)}

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the last answer."""
        plan = await agents.planner(question=task.prompt)
        pairs, _ = _pairs(plan["plan"])
        thoughts = {n: TracedText.by(f"{question} -> {answer}", plan.turn_index) for n, question, answer in pairs}
        answer = await agents.answerer(question=task.prompt, thoughts=_shown(thoughts))
        found = ""
        for _ in range(self.max_rounds):
            step = await agents.searcher(question=task.prompt, thoughts=_shown(thoughts), found=found)
            if step["choice"] != "search" and not self.stop_on_search_end:
                continue
            if step["choice"] != "search":
                reason = "ended" if step["choice"] == "end" else "no_search"
                return Outcome(answer=answer["final_answer"], stop_reason=reason)
            documents = await tools.retrieve(queries=[step["search"]])
            summary = await agents.summarizer(question=task.prompt, search=step["search"], documents=documents)
            evidence = summary["evidence"] or NO_EVIDENCE
            found = TracedText.joined(found, "\n" if found else "", step["search"], ": ", evidence)
            edit = await agents.updater(question=task.prompt, evidence=evidence, thoughts=_shown(thoughts))
            _apply(edit["update"] or edit["add"], thoughts, edit.turn_index)
            answer = await agents.answerer(question=task.prompt, thoughts=_shown(thoughts))
        return Outcome(answer=answer["final_answer"], stop_reason="last_round")


class _Pair(NamedTuple):
    number: int
    question: str
    answer: str


def _pairs(plan: str) -> tuple[list[_Pair], str]:
    """Returns the pairs `<q1>question</q1><a1>answer</a1>` of a plan, and the text outside of them."""
    pairs, rest, end = [], [], 0
    tags = list(_TAG.finditer(plan))
    i = 0
    while i + 4 <= len(tags):
        question, question_end, answer, answer_end = tags[i : i + 4]
        forms = [(tag[1], tag[2]) for tag in tags[i : i + 4]]
        is_one = len({tag[3] for tag in tags[i : i + 4]}) == 1 and forms == [
            ("", "q"),
            ("/", "q"),
            ("", "a"),
            ("/", "a"),
        ]
        if not is_one or plan[question_end.end() : answer.start()].strip():
            i += 1
            continue
        asked, answered = plan[question.end() : question_end.start()], plan[answer.end() : answer_end.start()]
        pairs.append(_Pair(int(question[3]), asked.strip(), answered.strip()))
        rest.append(plan[end : question.start()])
        end = answer_end.end()
        i += 4
    return pairs, "".join([*rest, plan[end:]])


def _shown(thoughts: dict[int, TracedText]) -> TracedText:
    parts = [part for number, text in sorted(thoughts.items()) for part in ("\n", f"t{number}: ", text)]
    return TracedText.joined(*parts[1:])


def _apply(edit: str, thoughts: dict[int, TracedText], origin: int) -> None:
    """Applies edits: `tK: text` replaces thought K or adds it; text without a number is a new thought."""
    match = _EDIT.match(edit.strip())
    if match:
        thoughts[int(match[1])] = TracedText.by(match[2].strip(), origin)
    elif edit.strip():
        thoughts[max(thoughts, default=0) + 1] = TracedText.by(edit.strip(), origin)
