"""What lies on the storage, read as it is: segments, journals, records; nothing is believed.

For fsck, rebuild and the collector, which must not take the index's word. Reads only.
"""
