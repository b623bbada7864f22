"""vLLM's scheduler for ``kvyard hunt``, which drives it through odd settings and faults."""

from kvyard.lab.hunt import storms
from kvyard.lab.hunt.engine import HuntedEngine
from kvyard.vllm.hunt import case, driver

ENGINE = HuntedEngine(
    title="vLLM",
    import_engine=driver.import_engine,
    run=driver.run,
    draw=case.draw,
    change=case.change,
    smaller=case.smaller,
    features=case.features,
    plain=case.PLAIN,
    legend="""Times are engine steps. A prompt is made of [first token id, count]. "load" is what a connector has of it
and in how many steps it comes (None: within the step): "once" as from a prefill worker, else as from a store, which
is asked again; "fails" of its loads fail.""",
    sources=(storms, driver),
)
