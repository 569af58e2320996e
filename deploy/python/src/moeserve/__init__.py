"""A client of the moeserve inference server, whose results are NumPy arrays.

The package also has the server itself: the command `moeserve`, see `moeserve --help`.
"""

from moeserve.client import Client, Error
from moeserve.results import BlockStatistics, Completion, ExpertStatistics, Piece, RouteBlock, Routes
from moeserve.server import Server

__all__ = ["BlockStatistics", "Client", "Completion", "Error", "ExpertStatistics", "Piece",
           "RouteBlock", "Routes", "Server"]
