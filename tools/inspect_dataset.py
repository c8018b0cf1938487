"""Say what a dataset holds: python tools/inspect_dataset.py --help"""

from megagate.data.inspect_dataset import main
from megagate.errors import run_command

if __name__ == "__main__":
    run_command(main)
