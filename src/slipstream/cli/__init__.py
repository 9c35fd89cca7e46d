"""The command line: the only place where strings become objects. Commands parse, build, call and print.

A command imports what it needs of the library when it runs, so that `--help` and wrong options answer at once.
"""

from slipstream.cli import batch as batch
from slipstream.cli import bench as bench
from slipstream.cli import chat as chat
from slipstream.cli import check as check
from slipstream.cli import distill as distill
from slipstream.cli import draft as draft
from slipstream.cli import generate as generate
from slipstream.cli import models as models
from slipstream.cli import plan as plan
from slipstream.cli import serve as serve
from slipstream.cli import transcribe as transcribe
from slipstream.cli.app import main as main
