"""Say what a run needs before it runs: python tools/plan.py --help"""

from megagate.errors import run_command
from megagate.plan.command import main

if __name__ == "__main__":
    run_command(main)
