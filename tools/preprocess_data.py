"""Turn raw text into the token files that training reads: python tools/preprocess_data.py --help"""

from megagate.data.preprocess import main
from megagate.errors import run_command

if __name__ == "__main__":
    run_command(main)
