"""One thread, no network, seeded: what every test may rely on."""

import os
import signal

import pytest
import torch
from comparisons import compared, document  # noqa: F401
from ranks import ranks  # noqa: F401 (a fixture)

# A shell ignores SIGINT in what it starts in the background, and so would everything that is started here.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # before any rank is forked, or the child hangs
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def warm_assert_close() -> None:
    """The first call of a process imports sympy (seconds); not inside some test's time-out, and before forking."""
    torch.testing.assert_close(torch.zeros(1), torch.zeros(1))
