"""``python -m flowdflash.cli``."""

from flowdflash.cli import main

main()
