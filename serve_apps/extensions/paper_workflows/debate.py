"""debate: agents answer, read each other with the answers hidden, answer again; then a vote or a summarizer (MAVERL/UMAD,
arXiv 2603.01221)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

from serve_apps.authoring.agent import Agent, Reply, TracedText
from serve_apps.authoring.boxed import last_boxes
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.workflow import Outcome, Workflow, together
from stores.settings import Count
from stores.types import Task

HIDDEN = "[answer hidden]"
MAX_MENTION_CHARS = 200
"""Characters of an answer whose mentions are told from parts of other words."""

DEBATE = (
    "Solve the problem step by step. Reply with <SOLUTION>steps</SOLUTION><ANSWER>answer</ANSWER> only.\n"
    "{review}{own}{others}Problem: {question}"
)
REVIEW = "Review your answer and the others'.\n"
SUMMARY = (
    "Say which answer is right. Reply with <ANSWER>answer</ANSWER> only.\nSolutions:\n{solutions}\nProblem: {question}"
)


class Debate(Workflow):
    """Runs `debater_0` to `debater_<n-1>`, and `summarizer` where it decides. The agents may be of any model groups.

    Peers' answers are hidden, so that no agent learns to copy the majority instead of the argument. A round in which all
    agree is the last one.
    """

    def __init__(
        self, num_agents: Count = 2, num_rounds: Count = 2, decide: Literal["vote", "summarizer"] = "vote"
    ) -> None:
        """Sets the workflow up.

        Args:
            num_agents: debaters.
            num_rounds: answers of each at most.
            decide: majority of the last answers (of the first among equals), or an agent that reads all solutions.
        """
        if decide not in ("vote", "summarizer"):
            raise TypeError(f"decide = {decide!r}: vote or summarizer")
        self.num_rounds, self.decide = num_rounds, decide
        self.debaters = [f"debater_{i}" for i in range(num_agents)]
        debater = Agent(prompt=DEBATE, contract=Tags("SOLUTION", "ANSWER"), cut=("others", "own"))
        self.agents = dict.fromkeys(self.debaters, debater)
        if decide == "summarizer":
            self.agents["summarizer"] = Agent(prompt=SUMMARY, contract=Tags("ANSWER"), cut=("solutions",))

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the answer that the team agrees on; its metadata counts the votes."""
        first = {"question": task.prompt, "review": "", "own": "", "others": ""}
        replies = await together(*(agents[name](**first) for name in self.debaters))
        for _ in range(self.num_rounds - 1):
            if _agree(replies):
                break
            replies = await together(
                *(agents[name](question=task.prompt, **_review(replies, i)) for i, name in enumerate(self.debaters))
            )
        votes = Counter(str(reply["answer"]) for reply in replies if reply["answer"])
        stop_reason = "consensus" if _agree(replies) else "last_round"
        if self.decide == "summarizer":
            parts = [(f"{i}: ", r["solution"], " = ", r["answer"], "\n") for i, r in enumerate(replies, 1)]
            final = await agents.summarizer(question=task.prompt, solutions=TracedText.joined(*chain(*parts)))
            answer = str(final["answer"])
        else:
            answer = votes.most_common(1)[0][0] if votes else ""
        return Outcome(answer=answer, stop_reason=stop_reason, metadata={"votes": dict(votes)})


def _review(replies: Sequence[Reply], i: int) -> dict[str, str]:
    """Returns what debater `i` reads in the next round."""
    others = [part for j, reply in enumerate(replies) if j != i for part in (without_answer(reply), "\n")]
    return {
        "review": REVIEW,
        "own": TracedText.joined("Yours: ", replies[i].text, "\n"),
        "others": TracedText.joined("Others:\n", *others),
    }


def _agree(replies: Sequence[Reply]) -> bool:
    answers = {str(reply["answer"]) for reply in replies}
    return len(answers) == 1 and "" not in answers


def without_answer(reply: Reply) -> TracedText:
    """Hides the solution's last boxes and every mention of the answer; a number inside another one is no mention."""
    solution, answer = reply["solution"], reply["answer"]
    text = str(solution)
    for box in reversed(last_boxes(text)):
        text = text[: box.start] + HIDDEN + text[box.end :]
    if len(answer) > MAX_MENTION_CHARS:
        text = text.replace(answer, HIDDEN)  # no part of a longer word; the expression would read it again and again
    elif answer:
        text = re.sub(rf"(?<![\w.]){re.escape(answer)}(?![\w]|\.\d)", HIDDEN, text)
    return TracedText.by(text, reply.turn_index)
