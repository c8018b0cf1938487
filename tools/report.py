"""Compare training runs on one page: python tools/report.py --help"""

from megagate.errors import run_command
from megagate.report.command import main

if __name__ == "__main__":
    run_command(main)
