"""`python -m lockstep.cli`, and so what torchrun and deepspeed start."""

import sys

from lockstep.cli.app import main

sys.exit(main())
