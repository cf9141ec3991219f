"""The words that both sides of the bus speak: names, TRES, account states, events, status records.

Pure: no input or output, no asyncio. `producers` and `consumers` import it; it imports neither.
"""
