"""What holds on a machine with a GPU, and how fast: python tools/gpu_check.py --help"""

from megagate.errors import run_command
from megagate.gpu_check.command import main

if __name__ == "__main__":
    run_command(main)
