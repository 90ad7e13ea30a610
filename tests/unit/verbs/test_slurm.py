"""The batch script: its text, and what it does with a run folder, among programs that only note their call."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.contract.errors import RunFolderError, UserError
from paceline.contract.signals import STOPPED_FILE
from paceline.verbs import cli
from paceline.verbs.launch import submit
from paceline.verbs.launch.slurm import Job, parse_seconds, script, slurm_time
from paceline.verbs.launch.submit import check_folder, described, follow

GOLDEN = Path(__file__).with_name("slurm_scripts")

JOBS = {
    "two_nodes": Job(
        name="imdb",
        run=Path("/data/runs/imdb"),
        folder=Path("/home/ada/project"),
        paceline=["/home/ada/project/.venv/bin/python", "-m", "paceline"],
        begin=["train", "recipes/imdb_bert_ddp.yaml", "--set", "optimizer.lr=3e-5"],
        nodes=2,
        gpus=8,
        seconds=4 * 3600,
        partition="gpu",
        options=["--account=team", "-C", "a100", "--exclusive"],
        setup=["module load cuda"],
    ),
    "on_the_cpu": Job(
        name="it's one",
        run=Path("/data/my runs/it's one"),
        folder=Path("/home/ada/my project"),
        paceline=["python", "-m", "paceline"],
        begin=["train", "--model", "a model", "--data", "it's.csv"],
        trust=["--trust-references"],
        processes=4,
        signal="USR1",
        warn_seconds=60,
        starts_without_progress=5,
    ),
    "go_on": Job(
        name="imdb",
        run=Path("/data/runs/imdb"),
        folder=Path("/home/ada/project"),
        paceline=["python", "-m", "paceline"],
        gpus=4,
        requeue=False,
        options=["--gres=gpu:a100:4"],
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_script_is_the_one_that_was_read(name: str) -> None:
    """After a change that is meant, write what this prints into the file, and read it."""
    text = script(JOBS[name])
    assert text == (GOLDEN / f"{name}.sh").read_text(), text


@pytest.mark.parametrize("name", JOBS)
def test_the_script_is_one_for_bash(name: str) -> None:
    subprocess.run(["bash", "-n"], input=script(JOBS[name]), text=True, check=True, timeout=20)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4h", 14400),
        ("90m", 5400),
        ("1h30m", 5400),
        ("2d", 172800),
        ("1d12h", 129600),
        ("45s", 45),
        ("240", 14400),
        ("4:00:00", 14400),
        ("90:30", 5430),
        ("1-12", 129600),
        ("1-12:30:00", 131400),
        (" 4h ", 14400),
    ],
)
def test_times_are_read(text: str, seconds: int) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0h", "h", "4 hours", "-4h", "4h4h", "1:2:3:4", "1-", "٤h", "9" * 50])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--time") as refused:
        parse_seconds(text)
    assert "--time 4h" in refused.value.fix


def test_times_are_written_as_slurm_has_them() -> None:
    assert [slurm_time(seconds) for seconds in (60, 14400, 131400)] == ["00:01:00", "04:00:00", "1-12:30:00"]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--time=1h"], "here it follows from --time"),
        (["-t4"], "here it follows from --time"),
        (["-N", "3"], "here it follows from --nodes"),
        (["--array=0-3"], "a job for each run"),
        (["--output=x"], "--out, which the log lies beside"),
        (["--signal=USR1@9"], "--signal and --warn"),
        (["x"], "no option of sbatch"),
        (["--account=a", "b"], "no option of sbatch"),
        (["-C", "a", "b"], "no option of sbatch"),
        (["--comment=a\nrm -rf /"], "more than one line"),
        (["--comment", "a\nrm -rf /"], "more than one line"),
    ],
)
def test_options_that_would_say_something_twice_are_refused(options: Sequence[str], part: str) -> None:
    with pytest.raises(UserError) as refused:
        script(replace(JOBS["two_nodes"], options=options))
    assert part in str(refused.value)


PROGRAM = """#!/bin/bash
echo "{name} $*" >> {calls}
{body}
"""


class Cluster:
    """Programs of Slurm's that note how they were called, and the script among them."""

    def __init__(self, place: Path) -> None:
        self.place, self.calls = place, place / "calls"
        self.calls.touch()
        self.job = replace(
            JOBS["on_the_cpu"], run=place / "it's a run", folder=place, paceline=["pace line"], signal="USR2"
        )
        self.programs = place / "bin"
        self.programs.mkdir()
        self.job.logs.mkdir()
        self.program("srun", "")
        self.program("scontrol", "")

    def program(self, name: str, body: str) -> None:
        file = self.programs / name
        file.write_text(PROGRAM.format(name=name, calls=self.calls, body=body))
        file.chmod(0o755)

    def environment(self, restart: int = 0) -> dict[str, str]:
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_CPUS_PER_TASK": "4", "SLURMD_NODENAME": "n1"}
        restarts = {"SLURM_RESTART_COUNT": str(restart)} if restart else {}
        return {"PATH": f"{self.programs}:{os.environ['PATH']}", "RUN": str(self.job.run), **slurm, **restarts}

    def start(self, restart: int = 0, job: Job | None = None) -> subprocess.CompletedProcess[str]:
        """The script runs once; what the programs were called with is in ``called``."""
        self.calls.write_text("")
        return subprocess.run(
            ["bash", "-s"],
            input=script(job or self.job),
            env=self.environment(restart),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def called(self) -> list[str]:
        return self.calls.read_text().splitlines()

    def save(self, step: int) -> None:
        folder = self.job.run / "checkpoints" / f"step-{step:08}"
        folder.mkdir(parents=True)
        (folder / "COMMITTED").touch()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


SRUN = "srun --ntasks-per-node=1 --cpus-per-task=4 --kill-on-bad-exit=0 pace line train"


def test_the_first_start_begins_and_a_summary_ends_it(cluster: Cluster) -> None:
    cluster.program("srun", 'mkdir -p "$RUN"; touch "$RUN/summary.json"; exit 3')
    done = cluster.start()
    (call,) = cluster.called()
    assert call == f"{SRUN} --model a model --data it's.csv --out {cluster.job.run} --processes=4"
    assert done.returncode == 0, "what srun says does not decide"
    assert "n1] start 1 of job 7: begins on n1\n" in done.stdout
    assert "the run is finished" in done.stdout
    again = cluster.start(1)
    assert (again.returncode, cluster.called()) == (0, []), "a finished run was started again"


def test_srun_that_says_all_is_well_does_not_decide(cluster: Cluster) -> None:
    cluster.save(5)
    done = cluster.start()
    assert done.returncode == 1
    assert "ended with exit code 0 before the run was finished" in done.stdout


def test_the_next_start_goes_on_from_the_newest_checkpoint(cluster: Cluster) -> None:
    for step in (8, 9, 10):
        cluster.save(step)
    (cluster.job.run / "checkpoints" / "step-00000011").mkdir()
    (cluster.job.run / "preempted").write_text("stopped by SIGUSR2 after step 9")
    done = cluster.start(1)
    assert cluster.called() == [f"{SRUN} {cluster.job.run} --resume --trust-references --processes=4"]
    assert "start 2 of job 7: goes on after step 10 on n1" in done.stdout
    assert not (cluster.job.run / "preempted").exists(), "a mark of an earlier start was left"


@pytest.mark.parametrize(
    ("mark", "requeued"),
    [
        ("stopped by SIGUSR2 after step 9 of 12; a checkpoint is saved", True),
        ("stopped by SIGUSR2 to rank 3 after step 9 of 12; a checkpoint is saved", True),
        ("stopped by SIGUSR2, and what was under way did not end; paceline train x --resume goes on", True),
        ("stopped by SIGTERM after step 9 of 12; a checkpoint is saved", False),
        ("stopped by SIGUSR1 after step 9 of 12; a checkpoint is saved", False),
        ("", False),
    ],
)
def test_only_the_warning_queues_the_job_again(cluster: Cluster, mark: str, requeued: bool) -> None:
    cluster.save(9)
    cluster.program("srun", f'echo "{mark}" > "$RUN/preempted"; exit 75')
    done = cluster.start()
    assert ("scontrol requeue 7" in cluster.called()) == requeued
    assert done.returncode == (0 if requeued else 75)
    assert ("queued again" in done.stdout) == requeued
    once = cluster.start(job=replace(cluster.job, requeue=False))
    assert (once.returncode, len(cluster.called())) == (75, 1), "--no-requeue queued the job again"


def test_a_warning_before_anything_is_saved_queues_the_job_again_but_not_for_ever(cluster: Cluster) -> None:
    word = f'echo "stopped by SIGUSR2" >> "${STOPPED_FILE}"; exit 75'
    cluster.program("srun", word)
    for restart in range(cluster.job.starts_without_progress):
        done = cluster.start(restart)
        assert done.returncode == 0
        assert "scontrol requeue 7" in cluster.called()
        assert "stopped by SIGUSR2 before anything was saved" in done.stdout
    done = cluster.start(cluster.job.starts_without_progress)
    assert (done.returncode, cluster.called()) == (1, [])
    assert "given up" in done.stdout


def test_a_start_that_the_warning_ends_before_it_listens_is_queued_again(cluster: Cluster) -> None:
    """Python takes a second to begin; until then the signal ends it, as srun's exit code says."""
    cluster.program("srun", "kill -USR2 $$")
    done = cluster.start()
    assert done.returncode == 0, done.stdout
    assert "scontrol requeue 7" in cluster.called()
    assert "stopped by SIGUSR2 before anything was saved" in done.stdout
    for other in ("kill -USR1 $$", "kill -TERM $$", "exit 12"):
        cluster.program("srun", other)
        assert cluster.start().returncode != 0
        assert "scontrol requeue 7" not in cluster.called(), other


def test_the_word_of_an_earlier_start_does_not_queue_a_job_again(cluster: Cluster) -> None:
    cluster.program("srun", f'echo "stopped by SIGUSR2" >> "${STOPPED_FILE}"; exit 75')
    cluster.start()
    cluster.program("srun", "exit 1")
    done = cluster.start(1)
    assert done.returncode == 1
    assert "scontrol requeue 7" not in cluster.called()


def test_a_job_that_cannot_be_queued_again_says_so(cluster: Cluster) -> None:
    cluster.save(9)
    cluster.program("srun", 'echo "stopped by SIGUSR2 after step 9" > "$RUN/preempted"; exit 75')
    cluster.program("scontrol", "echo 'Requested operation is presently disabled' >&2; exit 1")
    done = cluster.start()
    assert done.returncode == 1
    assert "presently disabled" in done.stderr


def test_a_folder_without_a_checkpoint_is_moved_aside(cluster: Cluster) -> None:
    cluster.job.run.mkdir()
    (cluster.job.run / "metrics.jsonl").write_text("of a start that a node took down\n")
    done = cluster.start(1)
    (aside,) = cluster.place.glob("it's a run.without-checkpoint-*")
    assert (aside / "metrics.jsonl").read_text() == "of a start that a node took down\n"
    assert not cluster.job.run.exists()
    assert f"moved to {aside}" in done.stdout
    assert "--out" in cluster.called()[0]


def test_a_run_that_is_only_to_go_on_begins_no_other(cluster: Cluster) -> None:
    cluster.job.run.mkdir()
    done = cluster.start(job=replace(cluster.job, begin=()))
    assert (done.returncode, cluster.called()) == (2, [])
    assert cluster.job.run.exists()


def test_starts_that_come_no_further_are_given_up_and_others_are_not(cluster: Cluster) -> None:
    cluster.save(3)
    for restart in range(5):
        assert cluster.called() or restart == 0
        assert "given up" not in cluster.start(restart).stdout
    done = cluster.start(5)
    assert (done.returncode, cluster.called()) == (1, [])
    assert "given up: 5 starts in a row came no further than step 3" in done.stdout
    cluster.save(4)
    assert "goes on after step 4" in cluster.start(6).stdout


def test_a_wish_to_end_reaches_what_runs_and_the_script_sees_it_out(cluster: Cluster) -> None:
    """Slurm sends SIGTERM to every process of a job; a rank that inherited an ignored one would never save."""
    cluster.save(1)
    cluster.program(
        "srun",
        'grep -i SigIgn /proc/self/status > "$RUN/ignored"; trap "touch \\"$RUN/summary.json\\"; exit 75" TERM\n'
        'touch "$RUN/ready"; for _ in {1..200}; do sleep 0.05; done',
    )
    file = cluster.place / "job.sh"
    file.write_text(script(cluster.job))
    with subprocess.Popen(
        ["bash", str(file)], env=cluster.environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 10
        while not (cluster.job.run / "ready").exists():
            assert time.monotonic() < deadline, "srun was not started"
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
    ignored = int((cluster.job.run / "ignored").read_text().split()[1], 16)
    assert not ignored & 1 << (signal.SIGTERM - 1), "the ranks would ignore SIGTERM"
    assert (process.returncode, "the run is finished" in out) == (0, True), out


def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    monkeypatch.setattr(sys, "argv", ["paceline", *words])
    code = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, *capsys.readouterr()


RECIPE = """
name: tiny
model: {config: {model_type: bert}, vocabulary_size: 900}
data: {source: a.csv, text: t}
loop: {batch_size: 8}
"""


@pytest.fixture
def at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


def test_a_dry_run_prints_the_script_and_leaves_nothing(
    at_work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("launch", "slurm", "r.yaml", "--nodes", "2", "--gpus", "4", "--time", "4h", "--lr", "1e-3", "--dry-run")
    code, out, err = typed(monkeypatch, capsys, *words, "--out", "runs/x", "--", "--account=team")
    assert (code, err) == (0, "")
    assert out.startswith("#!/bin/bash\n#SBATCH --job-name=tiny\n#SBATCH --nodes=2\n")
    assert "#SBATCH --account=team\n" in out
    assert 'train r.yaml --set optimizer.lr=1e-3 --out "$run" --gpus=4' in out
    assert f"paceline=({sys.executable} -P -m paceline)" in out
    assert os.listdir(at_work) == ["r.yaml"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["r.yaml", "--gpus", "2", "--processes", "2"], ("--gpus 2 with --processes 2",)),
        (["r.yaml", "--nodes", "4", "--gpus", "4"], ("loop.batch_size = 8: 16 processes", "loop.batch_size=16")),
        (["r.yaml", "--gpus", "2", "--set", "device=cpu"], ("device = cpu with --gpus 2",)),
        (["r.yaml", "--gpus", "all"], ("--gpus all", "--gpus 8")),
        (["r.yaml", "--time", "1h", "--warn", "2h"], ("--warn 2h with --time 1h",)),
        (["r.yaml", "--time", "soon"], ("--time 'soon'",)),
        (["r.yaml", "--set", "optimizer.lr=fast"], ("optimizer.lr",)),
        (["no.yaml"], ("no.yaml",)),
        (["r.yaml", "--out", "there"], ("there already", "another --out")),
        (["there", "--resume"], ("there: not a run folder",)),
        (["r.yaml", "--out", "50%"], ("%",)),
        (["r.yaml"], ("sbatch: no such program", "--dry-run")),
    ],
)
def test_mistakes_are_told_before_anything_is_submitted(
    at_work: Path,
    words: list[str],
    parts: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (at_work / "there").mkdir()
    (at_work / "there" / "x").touch()
    monkeypatch.setenv("PATH", "")
    code, _, err = typed(monkeypatch, capsys, "launch", "slurm", *words)
    assert code == 2, err
    for part in parts:
        assert part in err
    assert sorted(os.listdir(at_work)) == ["r.yaml", "there"]


QUEUE = """
n=$(cat looks 2>/dev/null || echo 0)
echo $((n + 1)) > looks
log=runs/x.slurm/12.log
case $n in
    0) echo PENDING;;
    1) echo "slurm: no answer" >&2; exit 1;;
    2) printf "one\\ntw" >> $log; echo RUNNING;;
    3) printf "o\\nthree\\n" >> $log; mkdir runs/x; touch runs/x/summary.json; echo COMPLETING;;
    *) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;;
esac
"""
"""Each look at the queue finds the job further on."""


def test_a_job_is_submitted_described_and_followed(
    cluster: Cluster, at_work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.program("sbatch", f'cp "$2" {at_work}/sent; echo "12;cluster"')
    cluster.program("squeue", QUEUE)
    monkeypatch.setenv("PATH", f"{cluster.programs}:{os.environ['PATH']}")
    monkeypatch.setattr(submit, "LOOK_SECONDS", 0.01)
    words = ("launch", "slurm", "r.yaml", "--gpus", "4", "--time", "90m", "--out", "runs/x", "--wait")
    code, out, err = typed(monkeypatch, capsys, *words)
    assert (code, err) == (0, "")
    logs = at_work / "runs" / "x.slurm"
    assert (at_work / "sent").read_text() == (logs / "job.sh").read_text()
    for part in (
        "12: 1 node with 4 GPUs, 01:30:00",
        f"run      {at_work}/runs/x\n",
        f"tail -F {logs}/12.log",
        "squeue -j 12",
        "scancel 12",
    ):
        assert part in out, out
    after = out.partition("scancel 12\n")[2].splitlines()
    assert after == [
        "job 12: pending",
        "job 12: running",
        "one",
        "job 12: completing",
        "two",
        "three",
        "job 12: ended, the run is finished",
    ]


def test_a_job_that_ends_without_a_finished_run_is_no_success(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.program("squeue", "")
    monkeypatch.setenv("PATH", f"{cluster.programs}:{os.environ['PATH']}")
    (cluster.job.logs / "12.log").write_text("the last word\n")
    shown: list[str] = []
    assert follow(cluster.job, "12", shown.append) == 1
    assert shown == ["the last word\n", "job 12: ended, and the run is not finished\n"]


def test_sbatch_that_refuses_is_quoted(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.program("sbatch", "echo 'sbatch: error: invalid partition specified: fast' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{cluster.programs}:{os.environ['PATH']}")
    with pytest.raises(UserError, match="invalid partition specified: fast"):
        submit.submit(cluster.job)


def test_a_run_folder_that_cannot_be_used_is_refused_before_the_job_waits(cluster: Cluster) -> None:
    check_folder(cluster.job)
    cluster.save(3)
    with pytest.raises(RunFolderError, match="is there already") as refused:
        check_folder(cluster.job)
    assert "--resume" in refused.value.fix
    on = replace(cluster.job, begin=())
    check_folder(on)
    shutil.rmtree(cluster.job.run)
    with pytest.raises(RunFolderError, match="nothing to go on with"):
        check_folder(on)


def test_what_a_person_wants_to_know_of_a_job() -> None:
    told = described(JOBS["two_nodes"], "7")
    assert "job      7: 2 nodes with 8 GPUs each, 04:00:00" in told
    assert "120 s before the time limit SIGUSR2" in told
    assert "requeue  no" in described(JOBS["go_on"], "7")
