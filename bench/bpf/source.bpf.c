// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Traffic source: run by BPF_PROG_TEST_RUN on live frames, writes the headers of each frame and redirects it to a veth.
// Twice as fast as any socket.

#include "wire.h"

#define FIRST_POD 0x0a010400 // 10.1.4.0
#define FIRST_REMOTE 0xc6330000 // 198.51.0.0
#define HOSTS 1024              // number of pods, and of remote hosts
#define REMOTE_PORT 443
#define CATCH_UP (20000ULL << 8) // after a stall, the source sends at most the packets of 20 us back to back

// Written by userspace as eight u64 (source.rs).
struct settings {
	__u64 duration; // ns from the first packet
	__u64 gap;      // 1/256 ns between packets; 0 = no gap
	__u64 flows;
	__u64 in_order; // flows in order instead of at random
	__u64 max_packets;
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

SINGLE(BPF_MAP_TYPE_ARRAY, settings, struct settings);
SINGLE(BPF_MAP_TYPE_ARRAY, progress, struct progress);

// The flow of a packet: a hash of its sequence number, so consecutive packets belong to unrelated flows.
static __always_inline __u32 flow_of(__u64 sequence, const struct settings *config)
{
	if (config->in_order)
		return sequence;
	__u64 mixed = sequence * 0x9e3779b97f4a7c15ULL;
	mixed = (mixed ^ (mixed >> 32)) * 0xd6e8feb86659fd93ULL;
	return ((mixed >> 32) * config->flows) >> 32;
}

SEC("xdp")
int wire_source(struct xdp_md *ctx)
{
	__u32 zero = 0;
	struct settings *config = bpf_map_lookup_elem(&settings, &zero);
	struct progress *done = bpf_map_lookup_elem(&progress, &zero);
	struct frame *frame = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	if (!config || !done || (void *)(frame + 1) > end)
		return XDP_ABORTED;

	__u64 now = bpf_ktime_get_ns(), scaled = now << 8;
	if (scaled < done->next || done->sent >= config->max_packets ||
	    (done->sent && now - done->first >= config->duration))
		return XDP_DROP;
	__u64 next = done->next + config->gap;
	done->next = next + CATCH_UP > scaled ? next : scaled - CATCH_UP;
	__u64 sequence = done->sent++;
	if (!sequence)
		done->first = now;
	done->last = now;

	// The kernel recycles frames with the receiver's changes, so all header bytes are written again.
	__u32 flow = flow_of(sequence, config);
	__u16 ip_length = (char *)end - (char *)&frame->ip, udp_length = ip_length - sizeof(struct iphdr);
	__builtin_memcpy(frame->eth.h_dest, &config->gateway_mac, ETH_ALEN);
	__builtin_memcpy(frame->eth.h_source, &config->source_mac, ETH_ALEN);
	frame->eth.h_proto = bpf_htons(ETH_P_IP);
	struct iphdr ip = {
		.version = 4,
		.ihl = 5,
		.tot_len = bpf_htons(ip_length),
		.frag_off = bpf_htons(0x4000),
		.ttl = 64,
		.protocol = 17,
		.saddr = bpf_htonl(FIRST_POD + flow % HOSTS),
		.daddr = bpf_htonl(FIRST_REMOTE + flow / HOSTS % HOSTS),
	};
	__u64 addresses = (__u64)ip.saddr + ip.daddr;
	ip.check = fold(addresses + bpf_htons(0x4500) + ip.tot_len + ip.frag_off + bpf_htons(64 << 8 | 17));
	// Pod and remote address already identify the flow; source ports are spread so that a system under test that
	// preserves source ports doesn't have to change them all.
	struct udphdr udp = {
		.source = bpf_htons(1024 + flow * 40503 % 60000),
		.dest = bpf_htons(REMOTE_PORT),
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
	return bpf_redirect(config->ifindex, 0);
}

// Some of the helpers require a GPL-compatible license.
char LICENSE[] SEC("license") = "GPL";
