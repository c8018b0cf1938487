"""An argument parser whose errors are one sentence."""

import argparse
import re
from typing import NoReturn

from megagate.errors import UserError, nearest


class HelpFormatter(argparse.HelpFormatter):
    """argparse's formatter for help texts that hold a bare percent sign, as one of Megatron's does."""

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (KeyError, TypeError, ValueError):
            return action.help or ""


class Parser(argparse.ArgumentParser):
    """argparse's parser, raising UserError instead of printing every flag there is and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError, naming the nearest flags for an unknown one."""
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        if unknown is not None:
            raise UserError(f"{unknown[1]} is no flag{nearest(unknown[1], self._option_string_actions)}")
        raise UserError(message)
