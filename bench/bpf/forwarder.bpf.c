// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Stateless forwarder between two interfaces, in XDP: what a gateway costs without sessions, ports or policy. Packets
// from pods get the VIP as source address, packets to the VIP the address of one pod as destination; ports stay.

#include "wire.h"
#include <linux/tcp.h>

// Written by userspace as four u64 (xdp.rs), for packets from pods, and for packets to them. MAC addresses are in the
// first six bytes, IP addresses in network order.
struct next_hop {
	__u64 mac;
	__u64 source_mac;
	__u64 address;     // the translated address
	__u64 destination; // of packets that are forwarded; 0 = all
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, struct next_hop);
} next_hops SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_DEVMAP);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, struct bpf_devmap_val);
} interfaces SEC(".maps");

// RFC 1624, equation 3: HC' = ~(~HC + ~m + m').
static __always_inline __u16 updated(__u16 check, __u32 before, __u32 after)
{
	return fold((__u64)(__u16)~check + (__u32)~before + after);
}

static __always_inline int forward(struct xdp_md *ctx, __u32 direction)
{
	struct next_hop *hop = bpf_map_lookup_elem(&next_hops, &direction);
	void *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = (void *)(long)ctx->data;
	struct iphdr *ip = (void *)(eth + 1);
	if (!hop || (void *)(ip + 1) > end || eth->h_proto != bpf_htons(ETH_P_IP) || ip->ihl != 5)
		return XDP_PASS;
	__u32 *address = direction ? &ip->daddr : &ip->saddr, before = *address, after = hop->address;
	if (ip->ttl <= 1 || (hop->destination && ip->daddr != hop->destination))
		return XDP_PASS;
	// Fragments have no ports and, but for the first one, no checksum.
	if (!(ip->frag_off & bpf_htons(0x1fff))) {
		struct tcphdr *tcp = (void *)(ip + 1);
		struct udphdr *udp = (void *)(ip + 1);
		if (ip->protocol == 6 && (void *)(tcp + 1) <= end)
			tcp->check = updated(tcp->check, before, after);
		if (ip->protocol == 17 && (void *)(udp + 1) <= end && udp->check) {
			__u16 check = updated(udp->check, before, after);
			udp->check = check ? check : 0xffff;
		}
	}
	__u16 with_ttl = *(__u16 *)&ip->ttl;
	*address = after;
	ip->ttl--;
	ip->check = updated(updated(ip->check, before, after), with_ttl, *(__u16 *)&ip->ttl);
	__builtin_memcpy(eth->h_dest, &hop->mac, ETH_ALEN);
	__builtin_memcpy(eth->h_source, &hop->source_mac, ETH_ALEN);
	return bpf_redirect_map(&interfaces, direction, 0);
}

// At the inside interface.
SEC("xdp")
int forward_out(struct xdp_md *ctx)
{
	return forward(ctx, 0);
}

// At the outside interface.
SEC("xdp")
int forward_in(struct xdp_md *ctx)
{
	return forward(ctx, 1);
}

// Drops all packets: the source's maximum rate is measured against it.
SEC("xdp")
int drop(struct xdp_md *ctx)
{
	return XDP_DROP;
}

// Some of the helpers require a GPL-compatible license.
char LICENSE[] SEC("license") = "GPL";
