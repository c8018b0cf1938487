"""The ranks of a job get signals, also the one that ends them, and the batch script none."""

import subprocess
import sys
from pathlib import Path

from tests.distributed import ROOT
from tests.launch.cluster import Cluster, wait_for

SCRIPT = f"""#!/bin/bash
export PYTHONPATH={ROOT}
for name in USR1 KILL; do
    srun --ntasks=2 --ntasks-per-node=1 bash -c 'trap "echo told; exit" USR1; touch "$1.$SLURM_PROCID"
        for i in $(seq 600); do sleep 0.1; done' _ "$1/$name" &
    until [ -e "$1/$name.0" ] && [ -e "$1/$name.1" ]; do sleep 0.1; done
    {sys.executable} -c "from megagate.supervise import slurm; slurm.signal_ranks('$name')"
    wait $!
    echo "after $name"
done
"""


def test_signals_to_the_steps_of_a_job(cluster: Cluster, tmp_path: Path) -> None:
    script, log = tmp_path / "job.sbatch", tmp_path / "log"
    script.write_text(SCRIPT)
    job = cluster.run("sbatch", "--nodes=2", f"--output={log}", str(script), str(tmp_path)).split()[-1]
    wait_for(lambda: cluster.job(job)["JobState"] not in ("PENDING", "RUNNING"), 120, "the end")
    lines = log.read_text().splitlines()
    assert cluster.job(job)["JobState"] == "COMPLETED", lines
    assert lines.count("told") == 2
    assert [line for line in lines if line.startswith("after")] == ["after USR1", "after KILL"]


def test_names_that_shells_take_apart(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm and the shell find log and flags of a run whose folder and name have all that is special to them."""
    save = tmp_path / "it's 100%j mine"
    (tmp_path / "recipe.yaml").write_text("lr: 1")
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    words = [sys.executable, "launch/submit.py", str(tmp_path / "recipe.yaml"), "--nodes", "1", "--gpus-per-node", "0"]
    words += ["--name", "my run", "--python", str(python), "--", "--save", str(save)]
    subprocess.run(words, cwd=ROOT, env=cluster.environment, check=True, timeout=60)
    job = cluster.run("squeue", "--noheader", "--format=%i", "--state=all").split()[-1]
    wait_for(lambda: cluster.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), 60, "the end")
    assert (save / "main.log").read_text().splitlines()[-1] == str(save)
