"""A profile from what a real engine did: from logs of its passes, or from what clients saw of its requests.

``passes`` reads passes, ``windows`` makes measurements of requests' token times, ``calibration`` fits both.
"""
