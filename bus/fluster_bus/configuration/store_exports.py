"""What the account of the streams gives to the account of the users and takes from it, and nothing besides."""

from __future__ import annotations

from dataclasses import dataclass

from fluster_bus.core import subjects


@dataclass(frozen=True)
class Export:
    """Subjects of one account that others may use: a service takes requests, a stream (`is_stream`) sends messages."""

    subject: str
    is_stream: bool = False
    many_answers: bool = False  # of a service: one request may have several


STORE_EXPORTS = (
    # The server keeps a note of each such request for two minutes, since it cannot know which answer is the last.
    *(Export(subject, many_answers=True) for subject in subjects.JETSTREAM_READS),
    *(
        Export(subject)
        for subject in (
            *subjects.JETSTREAM_ASKS,
            subjects.JETSTREAM_ACKS,
            subjects.JETSTREAM_FLOW,
            subjects.ALL_BUCKETS,
            subjects.ALL_OBJECTS,
            *subjects.STREAM_INPUTS,
        )
    ),
    # Those who may make consumers have them deliver to their inboxes, in the account of the streams.
    *(
        Export(subject, is_stream=True)
        for subject in (subjects.STREAM_OUTPUT, subjects.JETSTREAM_EVENTS, subjects.ALL_INBOXES)
    ),
)

# Archives of which streams are made. Not as requests: a server adds a header to those of another account, and takes it for a
# part of the archive. What is sent here names a reply subject that the account of the streams itself would write to: only
# operators may.
STORE_IMPORTS = (Export(subjects.JETSTREAM_RESTORES, is_stream=True),)
