"""SGLang's scheduler for ``kvyard hunt``, which drives it through odd settings."""

from kvyard.lab.hunt import storms
from kvyard.lab.hunt.engine import HuntedEngine
from kvyard.sglang import absent, copies, memory, server_args, storage, under_test
from kvyard.sglang.hunt import case, driver

ENGINE = HuntedEngine(
    title="SGLang",
    import_engine=driver.import_engine,
    run=driver.run,
    draw=case.draw,
    change=case.change,
    smaller=case.smaller,
    features=case.features,
    plain={"settings": {name: value for name, value in case.PLAIN.items() if name != "swa_full_tokens_ratio"}},
    legend=""""at" and "abort" are batches. A prompt is made of [first token id, count], "output" is [first token id, count].
"settings" are SGLang's arguments of the same names; num_tokens is the size of the pool.""",
    sources=(storms, absent, copies, storage, memory, server_args, under_test, driver),
)
