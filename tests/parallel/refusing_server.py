"""A server whose libraries initialised CUDA."""

from trainatomy.measurement.process import server

server._prepared = lambda *_: False

if __name__ == "__main__":
    server.main()
