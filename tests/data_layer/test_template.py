from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from flowdflash.data.chat import Conversation
from flowdflash.data.encode import ChatEncoder, EncodeOptions
from flowdflash.data.rows import Row
from flowdflash.data.template import ChatTemplate
from flowdflash.items import BatchInfo
from flowdflash.runtime.collate import collate
from flowdflash.stages.chat_jsonl import ChatJsonl

from .fixtures import END, T_GEN, f_row, make_tokenizer, say


@pytest.mark.timeout(20)
def test_generation_marks_followed_in_several_threads_are_those_of_the_own_row() -> None:
    tokenizer = make_tokenizer(T_GEN)
    rows = [Row(n, say(*["ab" * (n % 7 + 1)] * 4)) for n in range(60)]
    plain = [result.samples[0].mask.tolist() for result in ChatEncoder(tokenizer, EncodeOptions()).encode(rows)]
    start, wrong = threading.Barrier(4), list[object]()

    def work() -> None:
        encoder = ChatEncoder(tokenizer, EncodeOptions())
        start.wait(10)
        try:
            masks = [result.samples[0].mask.tolist() for result in encoder.encode(rows)]
            wrong.extend(n for n, mask in enumerate(masks) if mask != plain[n])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert not wrong


def test_template_for_tools_is_used_where_there_are_tools() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages[0]['content'] }}", "tool_use": "tools {{ tools | tojson }}"}
    template = ChatTemplate(tokenizer)
    asks = ({"role": "user", "content": "hi"},)
    assert template.prompt(Conversation(asks)) == "hi"
    assert template.prompt(Conversation(asks, ({"name": "f"},))) == 'tools [{"name": "f"}]'


def test_mask_is_not_one_place_off_after_padding(open_source: Callable[..., ChatJsonl]) -> None:
    source = open_source([f_row(10, 6), f_row(30, 17)])
    (table,) = source.epochs()
    lengths, supervised = tuple(table.lengths.tolist()), tuple(table.supervised.tolist())
    info = BatchInfo(0, 0, 0, 0, (0, 1), lengths, supervised, sum(lengths), 2 * max(lengths), 1.0)
    batch = collate(info, source.tokens, source="corpus")
    assert batch.input_ids.shape == batch.loss_mask.shape == (2, 68)
    for row, (user, answer) in enumerate(((10, 6), (30, 17))):
        assert np.flatnonzero(batch.loss_mask[row]).tolist() == list(range(19 + user, 20 + user + answer))
        assert bytes(batch.input_ids[row, 19 + user : 19 + user + answer].tolist()) == b"a" * answer
        assert batch.input_ids[row, 19 + user + answer] == END
