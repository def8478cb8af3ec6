// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Sends packets out of a veth, twice as fast as any socket does: run by BPF_PROG_TEST_RUN on live frames, it writes each
// one anew and redirects it.

#include "wire.h"

#define FIRST_POD 0x0a010400 // 10.1.4.0
#define FIRST_FAR 0xc6330000 // 198.51.0.0
#define HOSTS 1024           // pods, and as many far sides
#define FAR_PORT 443
#define CATCH_UP (20000ULL << 8) // a source that was held up sends at most 20 us' packets at once

// Written by userspace as eight numbers (source.rs), so all are 64 bits wide.
struct settings {
	__u64 duration; // ns from the first packet on
	__u64 gap;      // 1/256 ns from packet to packet; 0 = no gap
	__u64 flows;
	__u64 in_order; // every flow in turn, instead of at random
	__u64 most;     // packets
	__u64 ifindex;
	__u64 gateway_mac; // in the first six bytes
	__u64 source_mac;
};

struct progress {
	__u64 sent;
	__u64 next; // 1/256 ns
	__u64 first;
	__u64 last;
};

ONE(BPF_MAP_TYPE_ARRAY, settings, struct settings);
ONE(BPF_MAP_TYPE_ARRAY, progress, struct progress);

static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

// A number's flow. Every bit of the sequence number moves it, so neighbours have nothing to do with each other.
static __always_inline __u32 flow_of(__u64 sequence, const struct settings *wanted)
{
	if (wanted->in_order)
		return sequence;
	__u64 mixed = sequence * 0x9e3779b97f4a7c15ULL;
	mixed = (mixed ^ (mixed >> 32)) * 0xd6e8feb86659fd93ULL;
	return ((mixed >> 32) * wanted->flows) >> 32;
}

SEC("xdp")
int wire_source(struct xdp_md *ctx)
{
	__u32 zero = 0;
	struct settings *wanted = bpf_map_lookup_elem(&settings, &zero);
	struct progress *done = bpf_map_lookup_elem(&progress, &zero);
	struct frame *frame = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	if (!wanted || !done || (void *)(frame + 1) > end)
		return XDP_ABORTED;

	__u64 now = bpf_ktime_get_ns(), scaled = now << 8;
	if (scaled < done->next || done->sent >= wanted->most || (done->sent && now - done->first >= wanted->duration))
		return XDP_DROP;
	__u64 next = done->next + wanted->gap;
	done->next = next + CATCH_UP > scaled ? next : scaled - CATCH_UP;
	__u64 sequence = done->sent++;
	if (!sequence)
		done->first = now;
	done->last = now;

	// Frames come back as the receiver left them, so every byte of the headers is written again.
	__u32 flow = flow_of(sequence, wanted);
	__u16 ip_length = (char *)end - (char *)&frame->ip, udp_length = ip_length - sizeof(struct iphdr);
	__builtin_memcpy(frame->link.h_dest, &wanted->gateway_mac, ETH_ALEN);
	__builtin_memcpy(frame->link.h_source, &wanted->source_mac, ETH_ALEN);
	frame->link.h_proto = bpf_htons(ETH_P_IP);
	struct iphdr ip = {
		.version = 4,
		.ihl = 5,
		.tot_len = bpf_htons(ip_length),
		.frag_off = bpf_htons(0x4000),
		.ttl = 64,
		.protocol = 17,
		.saddr = bpf_htonl(FIRST_POD + flow % HOSTS),
		.daddr = bpf_htonl(FIRST_FAR + flow / HOSTS % HOSTS),
	};
	__u64 addresses = (__u64)ip.saddr + ip.daddr;
	ip.check = fold(addresses + bpf_htons(0x4500) + ip.tot_len + ip.frag_off + bpf_htons(64 << 8 | 17));
	// Pod and far side tell flows apart already; ports are spread so that no subject has to choose them all anew.
	struct udphdr udp = {
		.source = bpf_htons(1024 + flow * 40503 % 60000),
		.dest = bpf_htons(FAR_PORT),
		.len = bpf_htons(udp_length),
	};
	struct stamp stamp = {.sequence = sequence, .time = now, .magic = MAGIC};
	__u64 sum = addresses + bpf_htons(17) + 2 * (__u64)udp.len + udp.source + udp.dest + MAGIC;
	sum += (sequence & 0xffffffff) + (sequence >> 32) + (now & 0xffffffff) + (now >> 32);
	udp.check = fold(sum);
	if (!udp.check)
		udp.check = 0xffff;
	frame->ip = ip;
	frame->udp = udp;
	frame->stamp = stamp;
	return bpf_redirect(wanted->ifindex, 0);
}

// Some of the helpers are for GPL-compatible programs only.
char LICENSE[] SEC("license") = "GPL";
