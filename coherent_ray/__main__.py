"""The program: ``coherent-ray``, or ``python -m coherent_ray`` where its script is not on the path.

Its parts take a second to load, and Ctrl-C is no error in that second either.
"""

import sys


def main() -> None:
    """Run the command line, and exit."""
    try:
        from coherent_ray.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(130)  # `coherent_ray.cli.INTERRUPTED`, which may not have been loaded


if __name__ == "__main__":
    main()
