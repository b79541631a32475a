"""A child that prints its arguments."""

import json


def main(arguments: dict) -> int:
    """Executor and compiler."""
    print("ARGUMENTS " + json.dumps(arguments))
    return 0
