// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Which packets are vipgate's: they go to the AF_XDP socket of their queue, all others to the kernel.
//
//   ARP or neighbour solicitation for a VIP    -> socket
//   ARP from, or neighbour advertisement of it -> socket: another host claims it
//   to a VIP                                   -> socket
//   from a tunnel that ends at this gateway    -> socket
//   from an endpoint                           -> socket, unless it is for the gateway's own kernel, or can't leave the link
//   from a Service's backend, as its answer    -> socket: what comes from a port that it serves, or may do so
//   to an endpoint, from whom policy excludes  -> socket: the answer of an excluded destination
//   from a pod's address, inside, that is none
//   of these, to where the cluster ends        -> socket, unless it is for the gateway's own kernel, or can't leave the link
//   anything else                              -> kernel
//
// While nobody knows the policy, the program is closed: all that isn't for the gateway's own kernel, or can't leave the link,
// counts as ours.
//
// What is captured leaves translated or not at all: where no socket listens, it is dropped. Only the first buffer of a
// packet is read, and packets of more than one buffer are not asked for.

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/pkt_cls.h>

#define QUEUES 64     // of one interface
#define INTERFACES 16

// What an address is; it may be several things at once.
#define VIP      1
#define ENDPOINT 2
#define LOCAL    4    // the gateway's own kernel answers for it
#define BACKEND  8    // Services' clients are answered from it
#define TUNNEL   16   // tunnels end there, at the UDP ports that `listeners` names

struct host {
	__u32 policy; // of an endpoint: the number of its policy
	__u32 kinds;
};

struct v6 {
	__u64 high, low;
};

// What is said of a prefix: of a policy's destinations whether they are translated, of the cluster's own addresses whether they are pods'.
struct reach {
	__u8 is;
	__u8 length; // the prefix's own
};

struct cidr4 {
	__u32 length; // of what follows, in bits
	__u32 policy;
	__u32 address;
};

struct cidr6 {
	__u32 length;
	__u32 policy;
	struct v6 address;
} __attribute__((packed));

struct range4 {
	__u32 length;
	__u32 address;
};

struct range6 {
	__u32 length;
	struct v6 address;
} __attribute__((packed));

// Where a backend listens; the port is in network order.
struct listener4 {
	__u32 address;
	__u16 port;
	__u16 protocol;
};

struct listener6 {
	struct v6 address;
	__u16 port;
	__u16 protocol;
	__u32 zero;
};

#define HASH(name, key_type, value_type, size)                                                                          \
	struct {                                                                                                            \
		__uint(type, BPF_MAP_TYPE_HASH);                                                                                \
		__uint(max_entries, size);                                                                                      \
		__uint(map_flags, BPF_F_NO_PREALLOC);                                                                           \
		__type(key, key_type);                                                                                          \
		__type(value, value_type);                                                                                      \
	} name SEC(".maps")

#define TRIE(name, key_type, size)                                                                                      \
	struct {                                                                                                            \
		__uint(type, BPF_MAP_TYPE_LPM_TRIE);                                                                            \
		__uint(max_entries, size);                                                                                      \
		__uint(map_flags, BPF_F_NO_PREALLOC);                                                                           \
		__type(key, key_type);                                                                                          \
		__type(value, struct reach);                                                                                    \
	} name SEC(".maps")

// One table for all that an address can be: a packet's destination is looked up once, its source at most once.
HASH(hosts4, __u32, struct host, 819200);
HASH(hosts6, struct v6, struct host, 819200);
HASH(listeners4, struct listener4, __u8, 524288);
HASH(listeners6, struct listener6, __u8, 524288);
TRIE(cidrs4, struct cidr4, 524288);            // (policy, destination) -> 1 translated, 0 unchanged
TRIE(cidrs6, struct cidr6, 524288);
TRIE(ranges4, struct range4, 131072);          // the cluster's own addresses -> 1 pods that don't leave it uncovered, 0 others
TRIE(ranges6, struct range6, 131072);

// Number in the configuration -> ifindex. There are few, so looking at each is faster than a hash.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, INTERFACES);
	__type(key, __u32);
	__type(value, __u32);
} interfaces SEC(".maps");

// Number in the configuration -> not 0 where pods are.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, INTERFACES);
	__type(key, __u32);
	__type(value, __u32);
} insides SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, INTERFACES * QUEUES);      // interface * QUEUES + queue
	__type(key, __u32);
	__type(value, __u32);
} sockets SEC(".maps");

enum outcome { PASSED, CAPTURED, NO_SOCKET, GUARDED, OUTCOMES };

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, OUTCOMES);
	__type(key, __u32);
	__type(value, __u64);
} outcomes SEC(".maps");

static __always_inline void count(__u32 outcome)
{
	__u64 *counter = bpf_map_lookup_elem(&outcomes, &outcome);
	if (counter)
		(*counter)++;
}

// Destinations that no kernel forwards: multicast and limited broadcast. (169.254/16 and 240/4 it does forward.)
static __always_inline int is_on_link4(__u32 address)
{
	__u32 a = bpf_ntohl(address);
	return a >> 28 == 0xe || a == 0xffffffff;
}

static __always_inline int is_on_link6(const struct v6 *address)
{
	__u64 high = bpf_be64_to_cpu(address->high);
	return high >> 56 == 0xff || high >> 54 == 0xfe80 >> 6;
}

// One entry, of these bits.
#define CLOSED    1   // nobody knows the policy
#define UNCOVERED 2   // there are pods that don't leave the cluster uncovered
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} closed SEC(".maps");

static __always_inline __u32 what_is_closed(void)
{
	__u32 only = 0;
	__u32 *value = bpf_map_lookup_elem(&closed, &only);
	return value ? *value : 0;
}

static __always_inline __u32 kinds(const struct host *host)
{
	return host ? host->kinds : 0;
}

static __always_inline int has_ports(__u8 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP || protocol == IPPROTO_SCTP;
}

// Whether a backend's packet may be an answer to a Service's client. Where only the whole datagram tells, it may.
static __always_inline int may_answer4(const __u8 *l3, void *end)
{
	struct listener4 key = {};
	__u16 fragment;
	__builtin_memcpy(&fragment, l3 + 6, 2);
	if ((fragment & bpf_htons(0x3fff)) || l3[0] != 0x45 || l3 + 24 > (__u8 *)end)
		return 1;
	if (l3[9] == IPPROTO_ICMP)
		return l3[20] == 3 || l3[20] == 11 || l3[20] == 12;
	if (!has_ports(l3[9]))
		return 0;
	__builtin_memcpy(&key.address, l3 + 12, 4);
	__builtin_memcpy(&key.port, l3 + 20, 2);
	key.protocol = l3[9];
	return bpf_map_lookup_elem(&listeners4, &key) != 0;
}

static __always_inline int may_answer6(const __u8 *l3, void *end)
{
	struct listener6 key = {};
	if (l3 + 44 > (__u8 *)end)
		return 1;
	if (l3[6] == IPPROTO_ICMPV6)
		return l3[40] < 128;
	// Fragments, and what else may stand before the ports.
	if (l3[6] == IPPROTO_FRAGMENT || l3[6] == IPPROTO_HOPOPTS || l3[6] == IPPROTO_ROUTING || l3[6] == IPPROTO_DSTOPTS)
		return 1;
	if (!has_ports(l3[6]))
		return 0;
	__builtin_memcpy(&key.address, l3 + 8, 16);
	__builtin_memcpy(&key.port, l3 + 40, 2);
	key.protocol = l3[6];
	return bpf_map_lookup_elem(&listeners6, &key) != 0;
}

// Whether a packet to where tunnels end comes out of one: whole, and without options.
static __always_inline int is_tunnel4(const __u8 *l3, void *end)
{
	struct listener4 key = {};
	__u16 fragment;
	__builtin_memcpy(&fragment, l3 + 6, 2);
	if ((fragment & bpf_htons(0x3fff)) || l3[0] != 0x45 || l3[9] != IPPROTO_UDP || l3 + 24 > (__u8 *)end)
		return 0;
	__builtin_memcpy(&key.address, l3 + 16, 4);
	__builtin_memcpy(&key.port, l3 + 22, 2);
	key.protocol = IPPROTO_UDP;
	return bpf_map_lookup_elem(&listeners4, &key) != 0;
}

static __always_inline int is_tunnel6(const __u8 *l3, void *end)
{
	struct listener6 key = {};
	if (l3[6] != IPPROTO_UDP || l3 + 44 > (__u8 *)end)
		return 0;
	__builtin_memcpy(&key.address, l3 + 24, 16);
	__builtin_memcpy(&key.port, l3 + 42, 2);
	key.protocol = IPPROTO_UDP;
	return bpf_map_lookup_elem(&listeners6, &key) != 0;
}

// The number of an interface, or INTERFACES.
static __always_inline __u32 number_of(__u32 ifindex)
{
	for (__u32 number = 0; number < INTERFACES; number++) {
		__u32 key = number;
		__u32 *known = bpf_map_lookup_elem(&interfaces, &key);
		if (known && *known == ifindex)
			return number;
	}
	return INTERFACES;
}

static __always_inline int is_inside(__u32 ifindex)
{
	__u32 number = number_of(ifindex);
	__u32 *inside = bpf_map_lookup_elem(&insides, &number);
	return inside && *inside;
}

static __always_inline struct reach *range4(__u32 address)
{
	struct range4 key = {.length = 32, .address = address};
	return bpf_map_lookup_elem(&ranges4, &key);
}

static __always_inline struct reach *range6(const struct v6 *address)
{
	struct range6 key = {.length = 128, .address = *address};
	return bpf_map_lookup_elem(&ranges6, &key);
}

// Whether what a policy says of a destination is that it is translated: the cluster's own addresses aren't, unless it names them as closely.
static __always_inline int is_translated(const struct reach *said, const struct reach *own)
{
	return said && said->is && (!own || said->length >= own->length);
}

// What no policy covers, and isn't for the gateway's own kernel.
static __always_inline int is_kept4(__u32 source, __u32 destination, __u32 ifindex)
{
	__u32 closed = what_is_closed();
	if (closed & CLOSED)
		return 1;
	if (!(closed & UNCOVERED))
		return 0;
	struct reach *from = range4(source);
	return from && from->is && !range4(destination) && is_inside(ifindex);
}

static __always_inline int is_kept6(const struct v6 *source, const struct v6 *destination, __u32 ifindex)
{
	__u32 closed = what_is_closed();
	if (closed & CLOSED)
		return 1;
	if (!(closed & UNCOVERED))
		return 0;
	struct reach *from = range6(source);
	return from && from->is && !range6(destination) && is_inside(ifindex);
}

static __always_inline int is_ours4(const __u8 *l3, void *end, __u32 ifindex)
{
	__u32 source, destination;
	__builtin_memcpy(&source, l3 + 12, 4);
	__builtin_memcpy(&destination, l3 + 16, 4);
	struct host *to = bpf_map_lookup_elem(&hosts4, &destination);
	if (kinds(to) & (VIP | TUNNEL))
		if ((kinds(to) & VIP) || is_tunnel4(l3, end))
			return 1;
	struct host *from = bpf_map_lookup_elem(&hosts4, &source);
	if ((kinds(from) & ENDPOINT) || ((kinds(from) & BACKEND) && may_answer4(l3, end)))
		return !is_on_link4(destination) && !(kinds(to) & LOCAL);
	if (to && (to->kinds & ENDPOINT)) {
		struct cidr4 key = {.length = 64, .policy = to->policy, .address = source};
		if (!is_translated(bpf_map_lookup_elem(&cidrs4, &key), range4(source)))
			return !(kinds(from) & LOCAL);
	}
	return !is_on_link4(destination) && !(kinds(to) & LOCAL) && is_kept4(source, destination, ifindex);
}

static __always_inline int is_ours6(const __u8 *l3, void *end, __u32 ifindex)
{
	struct v6 source, destination;
	__builtin_memcpy(&source, l3 + 8, 16);
	__builtin_memcpy(&destination, l3 + 24, 16);
	struct host *to = bpf_map_lookup_elem(&hosts6, &destination);
	if (kinds(to) & (VIP | TUNNEL))
		if ((kinds(to) & VIP) || is_tunnel6(l3, end))
			return 1;
	struct host *from = bpf_map_lookup_elem(&hosts6, &source);
	if ((kinds(from) & ENDPOINT) || ((kinds(from) & BACKEND) && may_answer6(l3, end)))
		return !is_on_link6(&destination) && !(kinds(to) & LOCAL);
	if (to && (to->kinds & ENDPOINT)) {
		struct cidr6 key = {.length = 160, .policy = to->policy, .address = source};
		if (!is_translated(bpf_map_lookup_elem(&cidrs6, &key), range6(&source)))
			return !(kinds(from) & LOCAL);
	}
	return !is_on_link6(&destination) && !(kinds(to) & LOCAL) && is_kept6(&source, &destination, ifindex);
}

// 1: to the socket. 0: to the kernel.
static __always_inline int is_ours(void *data, void *end, __u32 ifindex)
{
	struct ethhdr *link = data;
	if ((void *)(link + 1) > end)
		return 0;
	__u8 *l3 = (__u8 *)(link + 1);

	if (link->h_proto == bpf_htons(ETH_P_IP)) {
		if (l3 + 20 > (__u8 *)end)
			return 0;
		return is_ours4(l3, end, ifindex);
	}
	if (link->h_proto == bpf_htons(ETH_P_IPV6)) {
		if (l3 + 40 > (__u8 *)end)
			return 0;
		// On the link, the question where a VIP is is ours, whoever asks, and so is the answer, if somebody else gives it.
		// What is addressed beyond the link is an ordinary packet, whatever it calls itself.
		if (l3[6] == IPPROTO_ICMPV6 && l3 + 64 <= (__u8 *)end && (l3[40] == 135 || l3[40] == 136)) {
			struct v6 target;
			__builtin_memcpy(&target, l3 + 48, 16);
			if (kinds(bpf_map_lookup_elem(&hosts6, &target)) & VIP)
				return 1;
		}
		return is_ours6(l3, end, ifindex);
	}
	if (link->h_proto == bpf_htons(ETH_P_ARP)) {
		if (l3 + 28 > (__u8 *)end)
			return 0;
		__u32 sender, target;
		__builtin_memcpy(&sender, l3 + 14, 4);
		__builtin_memcpy(&target, l3 + 24, 4);
		return (kinds(bpf_map_lookup_elem(&hosts4, &target)) | kinds(bpf_map_lookup_elem(&hosts4, &sender))) & VIP;
	}
	return 0;
}

SEC("xdp")
int vipgate_steer(struct xdp_md *ctx)
{
	if (!is_ours((void *)(long)ctx->data, (void *)(long)ctx->data_end, ctx->ingress_ifindex)) {
		count(PASSED);
		return XDP_PASS;
	}
	__u32 interface = number_of(ctx->ingress_ifindex);
	__u32 queue = ctx->rx_queue_index;
	int action = XDP_DROP;
	if (interface < INTERFACES && queue < QUEUES)
		action = bpf_redirect_map(&sockets, interface * QUEUES + queue, XDP_DROP);
	count(action == XDP_REDIRECT ? CAPTURED : NO_SOCKET);
	return action;
}

// Second line, at the kernel's ingress behind the XDP program: what that one captures never comes here. While it is off, or another program is
// in its place, this drops the same packets, by the same tables, so that the kernel forwards nothing untranslated.
#define HEADERS 128 // as many bytes as `is_ours` looks at, and more
SEC("classifier")
int vipgate_guard(struct __sk_buff *skb)
{
	// The kernel has taken the tag off; the XDP program, which sees it, leaves such frames to it.
	if (skb->vlan_present)
		return TC_ACT_UNSPEC;
	__u32 length = skb->len < HEADERS ? skb->len : HEADERS;
	if ((void *)(long)skb->data + length > (void *)(long)skb->data_end)
		bpf_skb_pull_data(skb, length);
	if (!is_ours((void *)(long)skb->data, (void *)(long)skb->data_end, skb->ifindex))
		return TC_ACT_UNSPEC;
	count(GUARDED);
	return TC_ACT_SHOT;
}

// Some of the helpers are for GPL-compatible programs only.
char LICENSE[] SEC("license") = "GPL";
