"""Train, measure and tabulate a grid of settings: python tools/ablate.py --help"""

from megagate.ablate.command import main
from megagate.errors import run_command

if __name__ == "__main__":
    run_command(main)
