"""Join datasets into one: python tools/merge_datasets.py --help"""

from megagate.data.merge import main
from megagate.errors import run_command

if __name__ == "__main__":
    run_command(main)
