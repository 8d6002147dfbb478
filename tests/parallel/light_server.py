"""The server of measuring processes without the libraries of trainings, which take five seconds to load."""

from trainatomy.measurement.process import server

server.preload = lambda *_, **__: True

if __name__ == "__main__":
    server.GRACE_SECONDS = 0.2
    server.main()
