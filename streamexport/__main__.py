"""``python -m streamexport``, as launchers such as torchrun call it."""

from streamexport.cli import main

main()
