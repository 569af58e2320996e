"""A client of the moeserve inference server, whose results are NumPy arrays.

The package also has the server itself: the command `moeserve`, see `moeserve --help`.
"""

from moeserve.answers import Error
from moeserve.async_client import AsyncClient
from moeserve.client import Client
from moeserve.fields import (BeamSearch, Decoder, ExpertOverride, RoutingControl,
                             StructuredOutput)
from moeserve.results import (BlockStatistics, ChatAnswer, Completion, Entity, ExpertStatistics,
                              Labels, Piece, RouteBlock, Routes, ToolCall, Word)
from moeserve.server import Server

__all__ = ["AsyncClient", "BeamSearch", "BlockStatistics", "ChatAnswer", "Client", "Completion",
           "Decoder", "Entity", "Error", "ExpertOverride", "ExpertStatistics", "Labels", "Piece",
           "RouteBlock", "Routes", "RoutingControl", "Server", "StructuredOutput", "ToolCall", "Word"]
