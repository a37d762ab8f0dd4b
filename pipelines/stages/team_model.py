"""team_model: a registered team in the form that MLflow loads: prompts -> answers.

    mlflow.set_tracking_uri("sqlite:///runs/mlflow.db")
    mlflow.pyfunc.load_model("models:/TEAM@champion").predict(pd.DataFrame({"prompt": ["Compute 2+3*4"]}))

Asks the gateway that TROUPE_GATEWAY_URL names (with or without `/v1`), with the key in TROUPE_API_KEY; without one it loads the
team's models in this process. MLflow stores this file with the team and runs it ("models from code"), so it is the one place
beside stores/ that imports mlflow: it needs what is above stores.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from mlflow.pyfunc import PythonModel, PythonModelContext

from serve_apps.own_loop import result_of

ANSWER_S = 600.0


class TeamModel(PythonModel):
    """One team version. Rows have `prompt`, and may have `seed`."""

    _skip_type_hint_validation = True  # MLflow warns of every hint, and of none; the signature says what comes in

    def load_context(self, context: PythonModelContext) -> None:
        """Reads the manifest; nothing heavy is loaded before the first prediction."""
        from stores.registry.team import Team

        self._team = Team.from_text(Path(context.artifacts["team"]).read_text())
        self._local: Any = None

    def predict(self, context: Any, model_input: pd.DataFrame, params: Any = None) -> pd.DataFrame:
        """A row per prompt: `answer`, `status`, `num_turns`, `team_version` (of the gateway's answer; else empty)."""
        rows = pd.DataFrame(model_input)
        lists = [name for name in rows.columns if rows[name].map(lambda value: isinstance(value, list)).any()]
        rows = rows.explode(lists) if lists else rows  # MLflow makes one row of {"prompt": [...]}
        if "prompt" not in rows:
            raise ValueError(f"a team answers the column 'prompt'; there are {', '.join(map(str, rows.columns))}")
        url = os.environ.get("TROUPE_GATEWAY_URL", "")
        tasks = [(str(row["prompt"]), int(row.get("seed", 0))) for row in rows.to_dict("records")]
        answers = [self._ask(url, *task) for task in tasks] if url else result_of(self._play(tasks))
        return pd.DataFrame(answers)

    def _ask(self, url: str, prompt: str, seed: int) -> dict[str, Any]:
        from serve_apps.http.peer import Peer, PeerError

        key = os.environ.get("TROUPE_API_KEY", "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        runs = f"{url.rstrip('/').removesuffix('/v1')}/v1/workflows/{self._team.run_id}/runs"
        task = {"prompt": prompt, "seed": seed}
        try:
            reply = Peer(url, timeout_s=ANSWER_S).ask("POST", runs, json=task, headers=headers).json()
            return {
                "answer": reply["answer"],
                "status": reply["status"],
                "num_turns": len(reply["turns"]),
                "team_version": str(reply["troupe"]["team_version"]),
            }
        except (PeerError, ValueError) as error:
            raise RuntimeError(f"the gateway at {url}: {error}") from None
        except (LookupError, TypeError):
            raise RuntimeError(
                f"the gateway at {url}: an answer that is no run of a workflow: {str(reply)[:200]}"
            ) from None

    async def _play(self, tasks: list[tuple[str, int]]) -> list[dict[str, Any]]:
        from serve_apps.episode.runner import run_episode
        from serve_apps.episode.team import via
        from serve_apps.episode_spec import EpisodeSpec
        from serve_apps.policy.local_policy import LocalPolicy
        from stores.types import Purpose, Task

        if self._local is None:
            from pipelines.config.run_config import RunConfig
            from pipelines.run.run import Run
            from stores.team_code import in_use

            with in_use(self._team.code):
                run = Run(RunConfig.model_validate(self._team.config))
            team_spec = run.team_spec(dict(self._team.models), code=self._team.code)
            self._local = team_spec.build(), team_spec.limits, dict(self._team.models)
        acting, limits, models = self._local
        complete = via(LocalPolicy(models))
        answers = []
        for number, (prompt, seed) in enumerate(tasks):
            spec = EpisodeSpec(
                run_id=self._team.run_id,
                iteration=0,
                purpose=Purpose.AD_HOC,
                team_key=acting.team_key,
                task=Task(task_id=f"row-{number}", prompt=prompt, answers=()),
                episode_index=0,
                run_seed=seed,
            )
            trace = await run_episode(spec, team=acting, complete=complete, limits=limits)
            answers.append(
                {
                    "answer": trace.answer,
                    "status": trace.status.value,
                    "num_turns": len(trace.turns),
                    "team_version": "",
                }
            )
        return answers


mlflow.models.set_model(TeamModel())
