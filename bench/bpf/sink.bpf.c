// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Traffic sink: a tc classifier at the ingress of a veth, before the network stack. Counts all packets, marks their
// sequence numbers in a bitmap, and sends a sample of whole packets to userspace.

#include "wire.h"
#include <linux/pkt_cls.h>

#define BITMAP_WORDS (1 << 20) // of 64 sequence numbers each
#define MAX_BYTES 1514

struct counts {
	__u64 received;
	__u64 untranslated; // from the source, but not with an expected source address
	__u64 duplicates;   // sequence numbers received before
	__u64 unsampled;    // samples lost because the ring buffer was full
};

struct expected {
	__u64 source;      // address, network order
	__u64 source_mask; // bits of it that are compared
	__u64 sample_mask; // a packet is a sample if the hash of its sequence number is 0 under this mask
};

struct sample {
	__u64 time;
	__u32 length;
	__u8 bytes[MAX_BYTES];
};

SINGLE(BPF_MAP_TYPE_PERCPU_ARRAY, counts, struct counts);
SINGLE(BPF_MAP_TYPE_ARRAY, expected, struct expected);

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, BITMAP_WORDS);
	__type(key, __u32);
	__type(value, __u64);
} bitmap SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 32 << 20);
} samples SEC(".maps");

SEC("classifier")
int wire_sink(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct counts *count = bpf_map_lookup_elem(&counts, &zero);
	struct expected *settings = bpf_map_lookup_elem(&expected, &zero);
	if (!count || !settings)
		return TC_ACT_SHOT;
	struct frame *frame = (void *)(long)skb->data;
	if ((void *)(frame + 1) > (void *)(long)skb->data_end)
		return TC_ACT_SHOT;
	if (frame->eth.h_proto != bpf_htons(ETH_P_IP) || frame->ip.protocol != 17 || frame->stamp.magic != MAGIC)
		return TC_ACT_SHOT;

	__u64 sequence = frame->stamp.sequence;
	count->received++;
	count->untranslated += (frame->ip.saddr & settings->source_mask) != settings->source;
	__u32 word = sequence >> 6;
	__u64 *bits = bpf_map_lookup_elem(&bitmap, &word), bit = 1ULL << (sequence & 63);
	if (!bits || *bits & bit)
		count->duplicates++;
	else
		*bits |= bit;

	if ((sequence * 0x9e3779b97f4a7c15ULL >> 32) & settings->sample_mask)
		return TC_ACT_SHOT;
	__u64 now = bpf_ktime_get_ns();
	struct sample *sample = bpf_ringbuf_reserve(&samples, sizeof(*sample), 0);
	if (!sample) {
		count->unsampled++;
		return TC_ACT_SHOT;
	}
	__u32 length = skb->len;
	if (length < sizeof(*frame) || length > MAX_BYTES || bpf_skb_load_bytes(skb, 0, sample->bytes, length)) {
		bpf_ringbuf_discard(sample, BPF_RB_NO_WAKEUP);
		count->untranslated++;
		return TC_ACT_SHOT;
	}
	sample->time = now;
	sample->length = length;
	bpf_ringbuf_submit(sample, BPF_RB_NO_WAKEUP);
	return TC_ACT_SHOT;
}

// Some of the helpers require a GPL-compatible license.
char LICENSE[] SEC("license") = "GPL";
