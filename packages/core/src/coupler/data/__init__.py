"""Read rows from files or functions, draw an endless resumable stream from them, and
turn text into token ids.
"""

from coupler.data.dataset import Row, fingerprint, load_rows
from coupler.data.examples import Example, examples, supervised
from coupler.data.prompts import Prompt, encode_prompts
from coupler.data.sampling import prompt_stream
from coupler.data.stream import PromptStream
from coupler.data.templates import Codec

__all__ = [
    "Codec",
    "Example",
    "Prompt",
    "PromptStream",
    "Row",
    "encode_prompts",
    "examples",
    "fingerprint",
    "load_rows",
    "prompt_stream",
    "supervised",
]
