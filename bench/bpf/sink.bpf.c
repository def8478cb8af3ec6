// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Where packets end: at a veth's entrance to the stack, before any protocol sees them. All are counted and their numbers
// remembered; a few go to userspace, which looks at every byte.

#include "wire.h"
#include <linux/pkt_cls.h>

#define WORDS (1 << 20) // of 64 sequence numbers each
#define MOST_BYTES 1514

struct counts {
	__u64 seen;
	__u64 foreign;    // ours, but not from the VIP
	__u64 duplicates; // sequence numbers that were seen before
	__u64 unsampled;  // samples for which there was no room
};

struct expected {
	__u64 vip;  // network order
	__u64 mask; // of a mixed sequence number; zero under it = a sample
};

struct sample {
	__u64 time;
	__u32 length;
	__u8 bytes[MOST_BYTES];
};

ONE(BPF_MAP_TYPE_PERCPU_ARRAY, counts, struct counts);
ONE(BPF_MAP_TYPE_ARRAY, expected, struct expected);

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, WORDS);
	__type(key, __u32);
	__type(value, __u64);
} arrived SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 32 << 20);
} samples SEC(".maps");

SEC("classifier")
int wire_sink(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct frame *frame = (void *)(long)skb->data;
	struct counts *count = bpf_map_lookup_elem(&counts, &zero);
	struct expected *wanted = bpf_map_lookup_elem(&expected, &zero);
	if (!count || !wanted || (void *)(frame + 1) > (void *)(long)skb->data_end)
		return TC_ACT_SHOT;
	if (frame->link.h_proto != bpf_htons(ETH_P_IP) || frame->ip.protocol != 17 || frame->stamp.magic != MAGIC)
		return TC_ACT_SHOT;

	__u64 sequence = frame->stamp.sequence;
	count->seen++;
	count->foreign += frame->ip.saddr != wanted->vip;
	__u32 word = sequence >> 6;
	__u64 *bits = bpf_map_lookup_elem(&arrived, &word), bit = 1ULL << (sequence & 63);
	if (!bits || *bits & bit)
		count->duplicates++;
	else
		*bits |= bit;

	if ((sequence * 0x9e3779b97f4a7c15ULL >> 32) & wanted->mask)
		return TC_ACT_SHOT;
	__u64 now = bpf_ktime_get_ns();
	struct sample *sample = bpf_ringbuf_reserve(&samples, sizeof(*sample), 0);
	if (!sample) {
		count->unsampled++;
		return TC_ACT_SHOT;
	}
	__u32 length = skb->len;
	if (length < sizeof(*frame) || length > MOST_BYTES || bpf_skb_load_bytes(skb, 0, sample->bytes, length)) {
		bpf_ringbuf_discard(sample, BPF_RB_NO_WAKEUP);
		count->foreign++;
		return TC_ACT_SHOT;
	}
	sample->time = now;
	sample->length = length;
	bpf_ringbuf_submit(sample, BPF_RB_NO_WAKEUP);
	return TC_ACT_SHOT;
}

// Some of the helpers are for GPL-compatible programs only.
char LICENSE[] SEC("license") = "GPL";
