"""Say what a blend draws from each dataset: python tools/blend.py --help"""

from megagate.data.blend import main
from megagate.errors import run_command

if __name__ == "__main__":
    run_command(main)
