"""Not here yet: importing it says what to use instead of flash-attn 2's helpers for padding."""

from . import missing

raise ImportError(missing.message(__package__, "bert_padding"), name=__name__)
