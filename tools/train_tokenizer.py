"""Train a SentencePiece tokenizer on raw text: python tools/train_tokenizer.py --help"""

from megagate.data.train_tokenizer import main
from megagate.errors import run_command

if __name__ == "__main__":
    run_command(main)
