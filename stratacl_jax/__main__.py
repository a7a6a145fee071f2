"""`python -m stratacl_jax`: the same as the command `stratacl`."""

from .cli import main

if __name__ == "__main__":
    main()
