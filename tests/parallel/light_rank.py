"""The process of a rank without the libraries of trainings, which take five seconds to load and are not needed here."""

from trainatomy.measurement.process import rank

rank.preload = lambda allocator="": True

if __name__ == "__main__":
    raise SystemExit(rank.main())
