"""The command `ridgeway`. Verbs are loaded when they are used, so that none waits for what it does not need.

Whatever a user got wrong is one line on stderr and exit code 2.
"""

import importlib
import os
import sys

import click

import ridgeway

#: Verb -> (module, name in it).
_COMMANDS = {
    "run": ("ridgeway.cli.lifecycle", "run"),
    "up": ("ridgeway.cli.lifecycle", "up"),
    "down": ("ridgeway.cli.lifecycle", "down"),
    "status": ("ridgeway.cli.status", "status"),
    "events": ("ridgeway.cli.records", "events"),
    "timeline": ("ridgeway.cli.records", "timeline"),
    "logs": ("ridgeway.cli.records", "logs"),
    "kill": ("ridgeway.cli.kill", "kill"),
    "chaos": ("ridgeway.cli.chaos", "chaos"),
    "preempt": ("ridgeway.cli.preempt", "preempt"),
    "head": ("ridgeway.cli.parts", "head"),
    "worker": ("ridgeway.cli.parts", "worker"),
    "doctor": ("ridgeway.cli.doctor", "doctor"),
    "demo": ("ridgeway.cli.parts", "demo"),
}

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group whose commands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name]
        return getattr(importlib.import_module(module), name)


@click.group(cls=LazyGroup, no_args_is_help=False, invoke_without_command=True)
@click.version_option(ridgeway.__version__, prog_name="ridgeway")
@click.pass_context
def cli(context: click.Context) -> None:
    """Run JAX programs on a cluster whose workers may die.

    The program sees a lost worker as an exception and goes on when it has been replaced.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: list[str] | None = None) -> int:
    """Run a command line; returns its exit code."""
    try:
        result = cli.main(args=arguments, prog_name="ridgeway", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "ridgeway"
        return _mistake(f"{error.format_message().rstrip('.')}; see `{path} --help`")
    except click.ClickException as error:
        return _mistake(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has had enough (`| head`); Python must not complain at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except Exception as error:
        if not _is_for_the_user(error):
            raise
        return _mistake(str(error))


def _is_for_the_user(error: Exception) -> bool:
    """Whether an error's text was written for the user. Looked up by name: the modules may not be loaded."""
    modules = {
        "ridgeway.chaos.injection": "InjectionError",
        "ridgeway.launch.checks": "CheckError",
        "ridgeway.launch.cluster_folder": "ClusterError",
        "ridgeway.launch.control": "ControlError",
        "ridgeway.launch.local": "LaunchError",
    }
    kinds = [getattr(sys.modules[module], name) for module, name in modules.items() if module in sys.modules]
    return isinstance(error, tuple(kinds))


def _mistake(text: str) -> int:
    line = " ".join(text.split())
    print(f"ridgeway: error: {line}", file=sys.stderr)
    return EXIT_MISTAKE


if __name__ == "__main__":
    sys.exit(main())
