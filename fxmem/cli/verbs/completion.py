"""Completion for bash, zsh or fish.

Print a script with which the shell completes commands, options, cards and the names of models. Run it where the shell
starts, so that it is as new as fxmem.

    eval "$(fxmem completion bash)"    # in ~/.bashrc
    eval "$(fxmem completion zsh)"     # in ~/.zshrc, after compinit
    fxmem completion fish | source     # in ~/.config/fish/config.fish
"""

from __future__ import annotations

import argparse

from fxmem.cli.parser import argument

ARGUMENTS = (argument("shell SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish"),)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem completion`; return the exit code and the text for stdout."""
    from fxmem.cli.completion import SCRIPTS
    from fxmem.cli.verbs import build_parser, describe

    _, parsers = build_parser()
    return 0, SCRIPTS[options.shell]({verb: describe(verb).brief for verb in parsers}, parsers)
