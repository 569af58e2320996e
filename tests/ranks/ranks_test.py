"""Several ranks under mpirun give the output of one process, and end with each other.

    ranks_test.py MPIEXEC PROGRAM RANKS NAME OF A CLASS OR TEST...
"""

import sys
import unittest

from command_tests import Commands
from failure_tests import Failures
from model_tests import LargeModels, Models
from mpi_runs import Runs
from network_tests import Limits, Network
from serve_tests import Serve
from server_test import RanksTest

# unittest finds the tests that are named in the command by these names.
TESTS = (Commands, Failures, LargeModels, Limits, Models, Network, Serve)

if __name__ == "__main__":
    RanksTest.all_runs = Runs(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]], verbosity=2)
