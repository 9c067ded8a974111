"""Record conversations of a policy with exact token ids.

A :class:`Conversation` turns requests of messages into requests of ids, and keeps what
was fed and sampled. A :class:`Renderer` turns messages of one model into ids and back.
"""

from coupler.conversation.bridge import TemplateRenderer
from coupler.conversation.limits import ConversationOver, Limits
from coupler.conversation.recorder import Conversation, Generates
from coupler.conversation.rendering import Malformed, Parsed, ReadsCalls, Renderer
from coupler.conversation.tree import Row
from coupler.data import Codec
from coupler.interfaces import Ended, Message, Reply

__all__ = [
    "Codec",
    "Conversation",
    "ConversationOver",
    "Ended",
    "Generates",
    "Limits",
    "Malformed",
    "Message",
    "Parsed",
    "ReadsCalls",
    "Renderer",
    "Reply",
    "Row",
    "TemplateRenderer",
]
