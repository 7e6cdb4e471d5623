"""`python -m meshswarm` is `meshswarm`."""

from meshswarm.cli import main

main()
