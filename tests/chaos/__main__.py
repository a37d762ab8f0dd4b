"""chaos: in every stage, each kind of process is killed, ended or frozen, or the disk filled; nothing may be lost, doubled or changed.

    python -m tests.chaos                                   all cells that are not done yet, about two hours on 2 cores
    python -m tests.chaos --victims driver node --stages train
    MOMENTS=3 python -m tests.chaos                         each cell at three moments
    python -m tests.chaos --show                            the table so far

    undisturbed run (twin) ── then rounds: one iteration each, in every stage of it one victim
    round:  collect ╳driver   score ╳node   train ╳worker   sync ╳engine   evaluate ╳replica   promote ╳cluster ── checks

Cells are kept in runs/chaos/report.json; what failed is played again by the next call. The exit code is 1 if a cell failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil
from rich.console import Console

from pipelines.run.run import Run
from pipelines.stages.table import STAGES
from tests.chaos import checks, victims
from tests.chaos.airflow import Airflow, open_scene
from tests.chaos.ask import distance
from tests.chaos.report import REPORT, Cell, Report
from tests.chaos.scene import Door, Jobs, Local, Scene, durations, undisturbed, wait
from tests.chaos.victims import BY_NAME, Victim
from tests.mounts import NAMESPACE, is_allowed

FOLDER = REPORT.parent
SEED = 11
TWIN_ITERATIONS = 6
TWIN_TIMEOUT_S = 600.0
STAGE_TIMEOUT_S = 300.0
ROUND_TIMEOUT_S = 300.0
GONE_S = 15.0
"""How long what hangs on a killed process may outlive it."""
MAX_CLUSTERS = 2
"""Whole clusters that die within one iteration: each takes minutes, and cells are kept at its end."""
TOLERANCE = 1e-6
"""Of weights, between a trainer that was killed and one that was not."""
DOORS: dict[str, type[Door]] = {"local": Local, "small disk": Local, "jobs": Jobs, "airflow": Airflow}
SCENES: tuple[tuple[Callable[[Path], Scene], Path, tuple[str, ...]], ...] = (
    (Scene, FOLDER, ("local", "jobs")),
    (Scene, FOLDER / "disk", ("small disk",)),
    (open_scene, FOLDER, ("airflow",)),
)
"""What is started once, the folder of its run, and the doors that are tried on it."""
DISK_MIB = 512
ON_DISK = "CHAOS_ON_DISK"
"""The variable that is set where FOLDER / "disk" is a disk of its own."""


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--victims", nargs="+", choices=list(BY_NAME), default=list(BY_NAME), metavar="VICTIM")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="Begin no further round after these.")
    parser.add_argument("--twin", type=int, default=TWIN_ITERATIONS, help="Iterations of the undisturbed run.")
    parser.add_argument("--again", action="store_true", help="Play cells that are done, too.")
    parser.add_argument("--show", action="store_true", help="Print the table and end.")
    args = parser.parse_args()
    console = Console()
    console = console if console.is_terminal else Console(width=150)
    report = Report()
    if not args.show:
        signal.signal(signal.SIGTERM, _end)
        moments = int(os.environ.get("MOMENTS", "1"))
        wanted = [
            cell
            for cell in victims.cells(args.victims, args.stages, moments)
            if args.again or not report.has(*_key(cell))
        ]
        on_disk = [cell for cell in wanted if cell[0].door == "small disk"]
        if on_disk and ON_DISK not in os.environ:
            if is_allowed():
                _begin_again_with_a_disk()
            console.print("a small disk needs a mount namespace, which is not allowed here: its cells are left out")
            wanted = [cell for cell in wanted if cell not in on_disk]
        play(wanted, report, console, num_undisturbed=args.twin, seconds=60 * args.minutes)
    console.print(report.table())
    failed = [cell for cell in report.cells.values() if cell.verdict != "ok"]
    for cell in failed:
        console.print(f"[bold red]{cell.name}[/]: {cell.error} { {k: v for k, v in cell.checks.items() if v} }")
    console.print(f"{len(report.cells)} cells, {len(failed)} failed; {REPORT.relative_to(REPORT.parents[2])}")
    return int(bool(failed))


Plan = tuple[Victim, str, int]


def play(wanted: Sequence[Plan], report: Report, console: Console, *, num_undisturbed: int, seconds: float) -> None:
    """Plays the cells in rounds, one scene per door; a scene in which a run did not come through is left for a new one."""
    if not wanted:
        return
    began = time.monotonic()
    twin = undisturbed(FOLDER / "twin", num_undisturbed, timeout_s=TWIN_TIMEOUT_S)
    report.keep([], usual_seconds=durations(twin))
    console.print(f"{time.monotonic() - began:6.1f} s  undisturbed: {durations(twin)}")
    for open_with, folder, doors in SCENES:
        todo = [cell for cell in wanted if cell[0].door in doors]
        tries = dict.fromkeys(map(_name, todo), 0)
        while todo and time.monotonic() - began < seconds:
            scene = open_with(_new_root(folder))
            try:
                scene.world.up()
                while todo and time.monotonic() - began < seconds:
                    now = _next_round(todo)
                    for plan in now.values():
                        tries[_name(plan)] += 1
                    door = DOORS[next(iter(now.values()))[0].door]
                    done = play_round(scene, door, now, usual_s=durations(twin), twin=twin)
                    report.keep(done)
                    for cell in done:
                        console.print(f"{time.monotonic() - began:6.1f} s  {_line(cell)}")
                    settled = {(c.victim, c.stage, c.number) for c in done}
                    todo = [c for c in todo if _key(c) not in settled and tries[_name(c)] < 3]
                    if any(cell.error for cell in done):
                        break
                else:
                    _compare(scene, twin, report, console)
            finally:
                scene.world.down()


def play_round(
    scene: Scene, door: type[Door], kills: Mapping[str, Plan], *, usual_s: Mapping[str, float], twin: Run | None
) -> list[Cell]:
    """One iteration with a kill in each of these stages, then the checks; cells whose stage was over too soon are left out."""
    scene.begin(scene.iteration + 1)
    iteration = scene.iteration + 1
    cells: list[Cell] = []
    struck_by: dict[str, Struck] = {}
    driven = door(scene, iteration)
    try:
        for stage in STAGES:
            if stage not in kills:
                continue
            victim, _, number = kills[stage]
            share = victims.moment(SEED, victim.name, stage, number)
            cell = Cell(
                victim=victim.name, stage=stage, number=number, share=share, iteration=iteration, run=scene.root.name
            )
            try:
                if victim.name == "task process":
                    assert isinstance(driven, Airflow)
                    hit: Struck | None = strike_task(scene, driven, victim, cell)
                else:
                    hit = strike(scene, driven, victim, cell, usual_s[stage])
            except AssertionError as error:
                cell.error = str(error)
                cells.append(cell)
                break
            if hit is not None:
                cells.append(cell)
                struck_by[cell.name] = hit
        else:
            wait("the end of the iteration", driven.look, door=driven, timeout_s=ROUND_TIMEOUT_S)
            scene.world.complete()
            scene.iteration = iteration
            served = scene.served()
            keys = checks.collected(twin, iteration) if twin and iteration <= twin.config.iterations else None
            for cell in cells:
                struck = struck_by[cell.name]
                cell.checks |= checks.faults(scene.run, iteration, struck.before, served=served, keys=keys)
                cell.checks["nothing left behind"] = struck.left_behind
    except AssertionError as error:
        for cell in cells:
            cell.error = cell.error or str(error)
    finally:
        driven.end()
    return cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """What a kill is judged by."""

    before: checks.Look
    left_behind: str
    """Which of what was killed, or hung on it, was still there when the stage had ended; empty: nothing."""


def strike(scene: Scene, door: Door, victim: Victim, cell: Cell, usual_s: float) -> Struck | None:
    """Kills the victim in its stage and waits for the stage's end; None if the stage was over before.

    In collect not before an episode is stored: what is finished must be there to be kept.
    """
    run, stage = scene.run, cell.stage
    began_at = wait(
        f"{stage} to begin",
        lambda: door.began_at(run, stage) or (door.settled_at(run, stage) and "over"),
        door=door,
        timeout_s=STAGE_TIMEOUT_S,
        pause_s=min(0.005, door.pause_s),
    )
    if began_at == "over":
        return None
    due = began_at + cell.share * (usual_s + door.more_s)
    is_node, is_empty = victim.loses_node, stage == "collect"
    targets: list[psutil.Process] = []
    while not (targets or is_node) or time.time() < due or is_empty:
        targets = targets or ([] if is_node else _targets(scene, door, victim))
        is_empty = is_empty and not checks.has_episodes(run, cell.iteration)
        door.look()
        if door.settled_at(run, stage):
            return None
        time.sleep(0.005)
    node = scene.world.busiest(stage) if is_node else ""
    if is_node:
        top = scene.world.cluster.nodes[node].process.pid
        targets = victims.tree(top) if victim.name == "node" else victims.find(victims.RAYLET, [top])
    cell.after_s = time.time() - began_at
    return _kill_and_wait(scene, door, victim, cell, targets, node)


def strike_task(scene: Scene, door: Airflow, victim: Victim, cell: Cell) -> Struck:
    """The same for the process of an Airflow task, which lives while it sends the stage's job and while it takes the result."""
    run = scene.run
    process = wait(
        f"the task of {cell.stage}",
        lambda: door.task_process(cell.stage),
        door=door,
        timeout_s=STAGE_TIMEOUT_S,
        pause_s=0.02,
    )
    rows = [row for row in run.journal.stages(run.run_id, cell.iteration) if row.stage == cell.stage]
    cell.after_s = time.time() - rows[0].started_at if rows else 0.0
    return _kill_and_wait(scene, door, victim, cell, process, "")


def _kill_and_wait(
    scene: Scene, door: Door, victim: Victim, cell: Cell, targets: list[psutil.Process], node: str
) -> Struck:
    run, stage, iteration = scene.run, cell.stage, cell.iteration
    is_whole = victim.name in ("node", "cluster")
    dependants = set() if is_whole else {p for target in targets for p in victims.tree(target.pid)}
    door.num_kills += 1
    titles = [victims.title(process) for process in targets]
    cell.killed = victims.count_workers(titles) if is_whole else [title[:80].strip() for title in titles]
    if victim.name == "node":
        cell.spread = {kind: len(scene.world.cluster.where(kind)) for kind in victims.WORKERS}
    killed_at = time.time()
    if victim.name == "node":
        scene.world.lose(node)
    elif victim.name == "cluster":
        scene.world.down()
    else:
        victims.strike(victim.blow, targets, scene.root)
    before = checks.look(run, iteration)
    if victim.name == "cluster":
        scene.world.up()
    door.after_kill(victim, dependants)
    ended_at = wait(
        f"the end of {stage}",
        lambda: door.settled_at(run, stage),
        door=door,
        timeout_s=STAGE_TIMEOUT_S,
        pause_s=door.pause_s,
    )
    lives_on = victim.door == "airflow" or victim.blow in ("SIGSTOP", "full disk")
    left = "" if lives_on else _left_behind(dependants)
    if victim.loses_node:
        if victim.title == victims.RAYLET:
            scene.world.lose(node)
        scene.world.begin_to_complete()
    cell.seconds = max(0.0, ended_at - killed_at)
    cell.num_kept = len(before.episodes)
    cell.recovered_by, cell.num_restarts = door.recovered_by(victim, stage)
    return Struck(before=before, left_behind=left)


def _left_behind(dependants: Iterable[psutil.Process]) -> str:
    left = victims.survivors(dependants, GONE_S)
    shown = [victims.title(process)[:80] for process in left]
    victims.kill(left)
    return f"still there after {GONE_S:g} s: {shown}" if left else ""


def _targets(scene: Scene, door: Door, victim: Victim) -> list[psutil.Process]:
    if victim.name == "cluster":
        return [p for pid in scene.world.pids() for p in victims.tree(pid)]
    found = door.targets(victim)
    return found[:1] if victim.name in ("collector", "trainer worker, frozen") else found


def _next_round(todo: Sequence[Plan]) -> dict[str, Plan]:
    """The first cell of each stage that waits, all through one door; the whole cluster dies in rounds of its own, last."""

    def kind(cell: Plan) -> tuple[bool, str]:
        return cell[0].name == "cluster", cell[0].door

    first = min(todo, key=lambda cell: (kind(cell)[0], todo.index(cell)))
    now: dict[str, Plan] = {}
    for cell in todo:
        if kind(cell) == kind(first) and len(now) < (MAX_CLUSTERS if kind(first)[0] else len(STAGES)):
            now.setdefault(cell[1], cell)
    return now


def _compare(scene: Scene, twin: Run, report: Report, console: Console) -> None:
    """Trains the scene's own episodes again, undisturbed: a difference is a fault of the cells in train.

    Against the undisturbed run the weights are only compared: another batch in the engine may round another way, and
    then another token is drawn.
    """
    scene.world.complete()
    replayed = {int(k): v for k, v in json.loads(scene.ask("replay")).items()}
    both = range(1, min(scene.iteration, twin.config.iterations) + 1)
    apart = {k: distance(twin, twin.trained(k)["team"], scene.run.trained(k)["team"]) for k in both}
    console.print(f"{scene.root.name}: largest difference of weights, by iteration")
    console.print(f"  to an undisturbed trainer of the same episodes: {replayed}")
    console.print(f"  to the undisturbed run: {apart}")
    for cell in report.cells.values():
        if (cell.run, cell.stage) == (scene.root.name, "train") and cell.iteration in replayed and not cell.error:
            gap = replayed[cell.iteration]
            cell.checks["trained as undisturbed"] = f"weights differ by {gap:g}" if gap > TOLERANCE else ""
    runs = report.data.get("runs", {}) | {scene.root.name: {"to_replay": replayed, "to_undisturbed": apart}}
    report.keep([], runs=runs)


def _begin_again_with_a_disk() -> None:
    """Replaces this process by the same command in a mount namespace of its own, in which FOLDER / "disk" is a small disk."""
    (FOLDER / "disk").mkdir(parents=True, exist_ok=True)
    mount = f"mount -t tmpfs -o size={DISK_MIB}m none {shlex.quote(str(FOLDER / 'disk'))}"
    command = shlex.join([sys.executable, "-m", "tests.chaos", *sys.argv[1:]])
    os.environ[ON_DISK] = "yes"
    os.execvp(NAMESPACE[0], [*NAMESPACE, "sh", "-c", f"{mount} && exec {command}"])


def _new_root(folder: Path) -> Path:
    """A fresh folder; of earlier runs only the last is kept."""
    older = sorted(folder.glob("run-*"), key=lambda path: path.stat().st_mtime)
    for path in older[:-1]:
        shutil.rmtree(path, ignore_errors=True)
    root = folder / f"run-{time.strftime('%H%M%S')}"
    root.mkdir(parents=True)
    return root


def _key(cell: Plan) -> tuple[str, str, int]:
    return cell[0].name, cell[1], cell[2]


def _name(cell: Plan) -> str:
    return "/".join(map(str, _key(cell)))


def _line(cell: Cell) -> str:
    bad = {k: v for k, v in cell.checks.items() if v}
    seconds = "-" if cell.seconds is None else f"{cell.seconds:.1f} s"
    return (
        f"{cell.verdict:6} it{cell.iteration} {cell.name}: after {cell.after_s:.2f} s, recovered in {seconds} by "
        f"{cell.recovered_by} {bad or ''}{cell.error[-600:]}"
    )


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
