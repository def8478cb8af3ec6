// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Definitions shared by the BPF programs of the wire benchmark.

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/udp.h>

#define MAGIC 0x7677

// A map with one entry.
#define SINGLE(map_type, name, value_type)                                                                             \
	struct {                                                                                                           \
		__uint(type, map_type);                                                                                        \
		__uint(max_entries, 1);                                                                                        \
		__type(key, __u32);                                                                                            \
		__type(value, value_type);                                                                                     \
	} name SEC(".maps")

struct stamp {
	__u64 sequence;
	__u64 time; // CLOCK_MONOTONIC, ns
	__u16 magic;
} __attribute__((packed));

struct frame {
	struct ethhdr eth;
	struct iphdr ip;
	struct udphdr udp;
	struct stamp stamp;
} __attribute__((packed));

// The Internet checksum of a sum of 16-bit words, or of 32-bit words.
static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}
