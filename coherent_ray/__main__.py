"""``python -m coherent_ray``: the command line, where its script is not on the path."""

from coherent_ray.cli import main

if __name__ == "__main__":
    main()
