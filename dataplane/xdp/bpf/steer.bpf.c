// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Steering program: captures packets to be translated to the AF_XDP socket of their queue, passes others to the kernel.
//
//   ARP request or neighbor solicitation for a VIP          -> socket
//   ARP from a VIP, or neighbor advertisement of it         -> socket: address conflict
//   to a VIP                                                -> socket
//   to the private address of a VIP in a cloud              -> socket, and its ARP and neighbor discovery; if the kernel
//                                                              has the address, too, these and DHCP go there; if it is a
//                                                              tunnel endpoint, too, everything but tunnel packets
//   from a tunnel to this gateway                           -> socket
//   from an endpoint, neither to a local address nor
//   with link-local scope                                   -> socket
//   from a Service's backend, if it may be a reply          -> socket: source is a listener, or can't be determined
//   to an endpoint, from a destination excluded by policy   -> socket: untranslated reply
//   from a pod prefix on an inside interface, not covered
//   by policy, to outside of the cluster                    -> socket, except as for endpoints
//   ICMP error from an inside interface that quotes an
//   address of one of these, to a host that must not see it -> socket: a router's, about a translated packet
//   anything else, frames of VLANs among it                 -> kernel
//
// Priority tags (VLAN ID 0) change nothing of this: Linux removes them and forwards what is behind. For the socket they
// are removed here. A frame with more than MAX_PRIORITY_TAGS goes to the socket with the others, and is dropped there.
//
// While the policy is unknown, the program is closed: it captures all packets that are neither to a local address nor
// of link-local scope.
//
// Policy that waits is dropped here, as the workers don't know it: what an endpoint sends whose policy isn't in force
// yet, and, while an update of the maps has failed, all that comes from inside and leaves the cluster: an address that
// is missing in the maps may be a covered one.
//
// Captured packets are dropped if there is no socket on their queue, so they never leave untranslated. Only the first
// buffer of a packet is read; the program doesn't declare support for multi-buffer packets.

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/pkt_cls.h>

#define QUEUES 64     // per interface
#define INTERFACES 16

// Roles of an address, as a bit mask.
#define VIP      1
#define ENDPOINT 2
#define LOCAL    4    // an address of the gateway's kernel
#define BACKEND  8    // an address of a Service's backend
#define TUNNEL   16   // a tunnel endpoint; its UDP ports are in `listeners`
#define PRIVATE  32   // the private address of a VIP in a cloud

struct host {
	__u32 policy; // of an endpoint: ID of its policy, or NO_POLICY
	__u32 roles;
};

// The policy of an endpoint isn't in force yet.
#define NO_POLICY 0xffffffff

struct v6 {
	__u64 high, low;
};

// Attributes of a prefix.
struct prefix {
	__u8 flags;  // of policy destinations: TRANSLATED; of cluster prefixes: PODS, CHANGING
	__u8 length; // prefix length
};
#define TRANSLATED 1
#define PODS       1
#define CHANGING   2  // in the cluster only before or only after a change: outside for pods, inside for translation

struct cidr4 {
	__u32 length; // in bits, of the remaining key
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

// Listening address of a backend; the port is in network order.
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
		__type(value, struct prefix);                                                                                   \
	} name SEC(".maps")

// One map for all roles: one lookup for a packet's destination, at most one for its source.
// Tries have twice the room that policy may take: during a change they hold what was and what comes.
HASH(hosts4, __u32, struct host, 1048576);
HASH(hosts6, struct v6, struct host, 1048576);
HASH(listeners4, struct listener4, __u8, 524288);
HASH(listeners6, struct listener6, __u8, 524288);
TRIE(cidrs4, struct cidr4, 1048576);           // (policy, destination) -> translated or excluded; none: excluded
TRIE(cidrs6, struct cidr6, 1048576);
TRIE(cluster4, struct range4, 262144);         // cluster prefix -> pods, dropped if uncovered, or other
TRIE(cluster6, struct range6, 262144);

// Interface ID -> ifindex. A linear search is faster than a hash for this few.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, INTERFACES);
	__type(key, __u32);
	__type(value, __u32);
} interfaces SEC(".maps");

// Interface ID -> not 0 for inside interfaces.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, INTERFACES);
	__type(key, __u32);
	__type(value, __u32);
} inside_flags SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, INTERFACES * QUEUES);      // interface * QUEUES + queue
	__type(key, __u32);
	__type(value, __u32);
} sockets SEC(".maps");

enum outcome { PASSED, CAPTURED, NO_SOCKET, GUARDED, HELD, OUTCOMES };

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, OUTCOMES);
	__type(key, __u32);
	__type(value, __u64);
} outcomes SEC(".maps");

// Priority tag (IEEE 802.1Q): a VLAN tag with ID 0. Linux removes any number of them, without a VLAN device.
#define TAG_LENGTH        4      // control information, EtherType of what follows
#define VLAN_ID           0x0fff // in the control information
#define MAX_PRIORITY_TAGS 2      // 802.1ad around 802.1Q; more would only serve to hide a packet

static __always_inline void count(__u32 outcome)
{
	__u64 *counter = bpf_map_lookup_elem(&outcomes, &outcome);
	if (counter)
		(*counter)++;
}

// Destinations that the kernel doesn't forward: multicast and limited broadcast. (It does forward 169.254/16 and
// 240/4.)
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

// One entry of flags.
#define CLOSED     1  // the policy is unknown
#define UNCOVERED  2  // there are pod prefixes whose uncovered packets are dropped
#define INCOMPLETE 4  // covered addresses may be missing in the maps
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} flags SEC(".maps");

static __always_inline __u32 current_flags(void)
{
	__u32 key = 0;
	__u32 *value = bpf_map_lookup_elem(&flags, &key);
	return value ? *value : 0;
}

// What becomes of a packet.
enum verdict { PASS, CAPTURE, HOLD };

static __always_inline __u32 roles(const struct host *host)
{
	return host ? host->roles : 0;
}

// Whether an address is resolved by userspace. The kernel answers for what it has, and gets what it asks for.
static __always_inline int is_resolved_by_socket(__u32 roles)
{
	return (roles & VIP) || (roles & (PRIVATE | LOCAL)) == PRIVATE;
}

// Whether a packet to an address that the kernel and a VIP have is for the kernel: DHCP keeps the address there.
static __always_inline int is_dhcp4(const __u8 *l3, void *end)
{
	__u16 fragment, ports[2];
	__builtin_memcpy(&fragment, l3 + 6, 2);
	if ((fragment & bpf_htons(0x3fff)) || l3[0] != 0x45 || l3[9] != IPPROTO_UDP || l3 + 24 > (__u8 *)end)
		return 0;
	__builtin_memcpy(ports, l3 + 20, 4);
	return ports[0] == bpf_htons(67) && ports[1] == bpf_htons(68);
}

// The same, and neighbor discovery (ICMPv6 types 133 to 137), which IPv6 sends to addresses.
static __always_inline int is_dhcp_or_nd6(const __u8 *l3, void *end)
{
	__u16 ports[2];
	if (l3 + 44 > (__u8 *)end)
		return 0;
	if (l3[6] == IPPROTO_ICMPV6)
		return l3[40] >= 133 && l3[40] <= 137;
	__builtin_memcpy(ports, l3 + 40, 4);
	return l3[6] == IPPROTO_UDP && ports[0] == bpf_htons(547) && ports[1] == bpf_htons(546);
}

#define ICMP_HEADER 8

// ICMP errors: unreachable, source quench, redirect, time exceeded, parameter problem; in ICMPv6 the lower half of the
// types. (Redirects of ICMPv6 have link-local scope.)
static __always_inline int is_error4(__u8 kind)
{
	return kind == 3 || kind == 4 || kind == 5 || kind == 11 || kind == 12;
}

static __always_inline int is_error6(__u8 kind)
{
	return kind < 128;
}

static __always_inline int has_ports(__u8 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP || protocol == IPPROTO_SCTP;
}

// Whether a backend's packet may be a reply to a client of a Service. True if the ports can't be determined (fragments,
// IP options): userspace decides then.
static __always_inline int may_be_reply4(const __u8 *l3, void *end)
{
	struct listener4 key = {};
	__u16 fragment;
	__builtin_memcpy(&fragment, l3 + 6, 2);
	if ((fragment & bpf_htons(0x3fff)) || l3[0] != 0x45 || l3 + 24 > (__u8 *)end)
		return 1;
	if (l3[9] == IPPROTO_ICMP)
		return is_error4(l3[20]);
	if (!has_ports(l3[9]))
		return 0;
	__builtin_memcpy(&key.address, l3 + 12, 4);
	__builtin_memcpy(&key.port, l3 + 20, 2);
	key.protocol = l3[9];
	return bpf_map_lookup_elem(&listeners4, &key) != 0;
}

static __always_inline int may_be_reply6(const __u8 *l3, void *end)
{
	struct listener6 key = {};
	if (l3 + 44 > (__u8 *)end)
		return 1;
	if (l3[6] == IPPROTO_ICMPV6)
		return is_error6(l3[40]);
	// Fragments and other extension headers.
	if (l3[6] == IPPROTO_FRAGMENT || l3[6] == IPPROTO_HOPOPTS || l3[6] == IPPROTO_ROUTING || l3[6] == IPPROTO_DSTOPTS)
		return 1;
	if (!has_ports(l3[6]))
		return 0;
	__builtin_memcpy(&key.address, l3 + 8, 16);
	__builtin_memcpy(&key.port, l3 + 40, 2);
	key.protocol = l3[6];
	return bpf_map_lookup_elem(&listeners6, &key) != 0;
}

// Whether a packet to a tunnel endpoint is a tunnel packet: unfragmented and without IP options.
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

// The ID of an interface, or INTERFACES.
static __always_inline __u32 interface_id(__u32 ifindex)
{
	for (__u32 id = 0; id < INTERFACES; id++) {
		__u32 key = id;
		__u32 *value = bpf_map_lookup_elem(&interfaces, &key);
		if (value && *value == ifindex)
			return id;
	}
	return INTERFACES;
}

// An unknown interface counts as inside: a recreated one, whose ifindex couldn't be written to the map.
static __always_inline int is_inside(__u32 ifindex)
{
	__u32 id = interface_id(ifindex);
	__u32 *inside = bpf_map_lookup_elem(&inside_flags, &id);
	return !inside || *inside;
}

static __always_inline struct prefix *cluster_prefix4(__u32 address)
{
	struct range4 key = {.length = 32, .address = address};
	return bpf_map_lookup_elem(&cluster4, &key);
}

static __always_inline struct prefix *cluster_prefix6(const struct v6 *address)
{
	struct range6 key = {.length = 128, .address = *address};
	return bpf_map_lookup_elem(&cluster6, &key);
}

// Whether a policy translates a destination. A destination in the cluster is translated only if the policy's prefix is
// at least as long as the cluster's.
static __always_inline int is_translated(const struct prefix *policy, const struct prefix *cluster)
{
	return policy && (policy->flags & TRANSLATED) && (!cluster || policy->length >= cluster->length);
}

// The same for the policy of an endpoint.
static __always_inline int translates4(__u32 policy, __u32 remote, const struct prefix *cluster)
{
	struct cidr4 key = {.length = 64, .policy = policy, .address = remote};
	return is_translated(bpf_map_lookup_elem(&cidrs4, &key), cluster);
}

static __always_inline int translates6(__u32 policy, const struct v6 *remote, const struct prefix *cluster)
{
	struct cidr6 key = {.length = 160, .policy = policy, .address = *remote};
	return is_translated(bpf_map_lookup_elem(&cidrs6, &key), cluster);
}

// Whether a destination is in the cluster for a packet that leaves it unless it is.
static __always_inline int is_in_cluster(const struct prefix *cluster)
{
	return cluster && !(cluster->flags & CHANGING);
}

// What a packet shows outside of the cluster that has an address in this prefix: captured if it is a pod's.
static __always_inline enum verdict of_pod(const struct prefix *prefix)
{
	return prefix && (prefix->flags & PODS) ? CAPTURE : PASS;
}

// A packet that no other rule matches: captured when closed, or from an uncovered pod to outside; held from anybody
// inside to outside when incomplete.
static __always_inline enum verdict other4(__u32 source, __u32 destination, __u32 ifindex)
{
	__u32 current = current_flags();
	if (current & CLOSED)
		return CAPTURE;
	if (!(current & (UNCOVERED | INCOMPLETE)) || is_in_cluster(cluster_prefix4(destination)) || !is_inside(ifindex))
		return PASS;
	if (current & INCOMPLETE)
		return HOLD;
	return of_pod(cluster_prefix4(source));
}

static __always_inline enum verdict other6(const struct v6 *source, const struct v6 *destination, __u32 ifindex)
{
	__u32 current = current_flags();
	if (current & CLOSED)
		return CAPTURE;
	if (!(current & (UNCOVERED | INCOMPLETE)) || is_in_cluster(cluster_prefix6(destination)) || !is_inside(ifindex))
		return PASS;
	if (current & INCOMPLETE)
		return HOLD;
	return of_pod(cluster_prefix6(source));
}

// What becomes of an ICMP error from inside that quotes an address. If its receiver must not see that, userspace
// decides: it has the session of the quoted packet, or drops the error.
static __always_inline enum verdict quoted4(__u32 address, __u32 destination)
{
	struct host *host = bpf_map_lookup_elem(&hosts4, &address);
	struct prefix *cluster = cluster_prefix4(destination);
	if (roles(host) & BACKEND)
		return CAPTURE;
	if (host && (host->roles & ENDPOINT)) {
		if (host->policy == NO_POLICY)
			return HOLD;
		return translates4(host->policy, destination, cluster) ? CAPTURE : PASS;
	}
	if (!(current_flags() & UNCOVERED) || is_in_cluster(cluster))
		return PASS;
	return of_pod(cluster_prefix4(address));
}

static __always_inline enum verdict quoted6(const struct v6 *address, const struct v6 *destination)
{
	struct host *host = bpf_map_lookup_elem(&hosts6, address);
	struct prefix *cluster = cluster_prefix6(destination);
	if (roles(host) & BACKEND)
		return CAPTURE;
	if (host && (host->roles & ENDPOINT)) {
		if (host->policy == NO_POLICY)
			return HOLD;
		return translates6(host->policy, destination, cluster) ? CAPTURE : PASS;
	}
	if (!(current_flags() & UNCOVERED) || is_in_cluster(cluster))
		return PASS;
	return of_pod(cluster_prefix6(address));
}

// What an ICMP error quotes: nothing, if it is no error; no whole header of its address family; or the addresses of
// one.
enum quote { NO_ERROR, NO_HEADER, QUOTED };

// Behind any options. A later fragment has no quote.
static __always_inline enum quote quote4(const __u8 *l3, void *end, __u32 quoted[2])
{
	__u64 header = (l3[0] & 15) * 4;
	const __u8 *message = l3 + header;
	__u16 fragment;
	__builtin_memcpy(&fragment, l3 + 6, 2);
	if (l3[9] != IPPROTO_ICMP || (fragment & bpf_htons(0x1fff)) || header < 20)
		return NO_ERROR;
	if (message + 1 > (const __u8 *)end || !is_error4(message[0]))
		return NO_ERROR;
	if (message + ICMP_HEADER + 20 > (const __u8 *)end || message[ICMP_HEADER] >> 4 != 4)
		return NO_HEADER;
	__builtin_memcpy(quoted, message + ICMP_HEADER + 12, 8);
	return QUOTED;
}

// Behind at most two extension headers of eight bytes each: routers send errors without any.
static __always_inline enum quote quote6(const __u8 *l3, void *end, struct v6 quoted[2])
{
	__u8 next = l3[6];
	__u64 at = 40;
#pragma unroll
	for (int headers = 0; headers < 2; headers++) {
		const __u8 *header = l3 + at;
		__u16 fragment;
		if (next == IPPROTO_ICMPV6)
			break;
		if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING && next != IPPROTO_DSTOPTS && next != IPPROTO_FRAGMENT)
			return NO_ERROR;
		if (header + 8 > (const __u8 *)end)
			return NO_ERROR;
		__builtin_memcpy(&fragment, header + 2, 2);
		if (next == IPPROTO_FRAGMENT ? (fragment & bpf_htons(0xfff8)) != 0 : header[1] != 0)
			return NO_ERROR;
		next = header[0];
		at += 8;
	}
	const __u8 *message = l3 + at;
	if (next != IPPROTO_ICMPV6 || message + 1 > (const __u8 *)end || !is_error6(message[0]))
		return NO_ERROR;
	if (message + ICMP_HEADER + 40 > (const __u8 *)end || message[ICMP_HEADER] >> 4 != 6)
		return NO_HEADER;
	__builtin_memcpy(quoted, message + ICMP_HEADER + 8, 32);
	return QUOTED;
}

// A packet that no other rule matches: captured or held if it is an ICMP error from inside that quotes an address which
// its receiver must not see. The receiver has sent the quoted packet, so it knows its source. Userspace drops an error
// without a whole quoted header.
static __always_inline enum verdict error4(const __u8 *l3, void *end, __u32 destination, __u32 ifindex)
{
	__u32 quoted[2] = {};
	enum quote quote = quote4(l3, end, quoted);
	if (quote == NO_ERROR || !is_inside(ifindex))
		return PASS;
	if (quote == NO_HEADER)
		return CAPTURE;
	enum verdict of_source = quoted[0] == destination ? PASS : quoted4(quoted[0], destination);
	return of_source == PASS ? quoted4(quoted[1], destination) : of_source;
}

static __always_inline enum verdict error6(const __u8 *l3, void *end, const struct v6 *destination, __u32 ifindex)
{
	struct v6 quoted[2] = {};
	enum quote quote = quote6(l3, end, quoted);
	if (quote == NO_ERROR || !is_inside(ifindex))
		return PASS;
	if (quote == NO_HEADER)
		return CAPTURE;
	int is_sender = quoted[0].high == destination->high && quoted[0].low == destination->low;
	enum verdict of_source = is_sender ? PASS : quoted6(&quoted[0], destination);
	return of_source == PASS ? quoted6(&quoted[1], destination) : of_source;
}

// What an endpoint or a backend sends.
static __always_inline enum verdict from_inside(const struct host *from, int may_be_reply)
{
	return !may_be_reply && from->policy == NO_POLICY ? HOLD : CAPTURE;
}

static __always_inline enum verdict captures4(const __u8 *l3, void *end, __u32 ifindex)
{
	__u32 source, destination;
	__builtin_memcpy(&source, l3 + 12, 4);
	__builtin_memcpy(&destination, l3 + 16, 4);
	struct host *to = bpf_map_lookup_elem(&hosts4, &destination);
	if (roles(to) & (VIP | PRIVATE | TUNNEL)) {
		if (roles(to) & VIP)
			return 1;
		if ((roles(to) & (PRIVATE | TUNNEL)) == PRIVATE)
			return !((roles(to) & LOCAL) && is_dhcp4(l3, end));
		if ((roles(to) & TUNNEL) && is_tunnel4(l3, end))
			return 1;
	}
	struct host *from = bpf_map_lookup_elem(&hosts4, &source);
	int may_be_reply = (roles(from) & BACKEND) && may_be_reply4(l3, end);
	if (from && ((from->roles & ENDPOINT) || may_be_reply))
		return is_on_link4(destination) || (roles(to) & LOCAL) ? PASS : from_inside(from, may_be_reply);
	if (to && (to->roles & ENDPOINT) && !translates4(to->policy, source, cluster_prefix4(source)))
		return !(roles(from) & LOCAL);
	if (is_on_link4(destination) || (roles(to) & LOCAL))
		return PASS;
	enum verdict verdict = other4(source, destination, ifindex);
	return verdict == PASS ? error4(l3, end, destination, ifindex) : verdict;
}

static __always_inline enum verdict captures6(const __u8 *l3, void *end, __u32 ifindex)
{
	struct v6 source, destination;
	__builtin_memcpy(&source, l3 + 8, 16);
	__builtin_memcpy(&destination, l3 + 24, 16);
	struct host *to = bpf_map_lookup_elem(&hosts6, &destination);
	if (roles(to) & (VIP | PRIVATE | TUNNEL)) {
		if (roles(to) & VIP)
			return 1;
		if ((roles(to) & (PRIVATE | TUNNEL)) == PRIVATE)
			return !((roles(to) & LOCAL) && is_dhcp_or_nd6(l3, end));
		if ((roles(to) & TUNNEL) && is_tunnel6(l3, end))
			return 1;
	}
	struct host *from = bpf_map_lookup_elem(&hosts6, &source);
	int may_be_reply = (roles(from) & BACKEND) && may_be_reply6(l3, end);
	if (from && ((from->roles & ENDPOINT) || may_be_reply))
		return is_on_link6(&destination) || (roles(to) & LOCAL) ? PASS : from_inside(from, may_be_reply);
	if (to && (to->roles & ENDPOINT) && !translates6(to->policy, &source, cluster_prefix6(&source)))
		return !(roles(from) & LOCAL);
	if (is_on_link6(&destination) || (roles(to) & LOCAL))
		return PASS;
	enum verdict verdict = other6(&source, &destination, ifindex);
	return verdict == PASS ? error6(l3, end, &destination, ifindex) : verdict;
}

// Whether the EtherType of a header is that of a priority tag.
static __always_inline int is_priority_tag(const struct ethhdr *eth, void *end)
{
	const __u8 *tag = (const __u8 *)(eth + 1);
	__u16 control;
	if (eth->h_proto != bpf_htons(ETH_P_8021Q) && eth->h_proto != bpf_htons(ETH_P_8021AD))
		return 0;
	if (tag + 2 > (const __u8 *)end)
		return 0;
	__builtin_memcpy(&control, tag, 2);
	return !(control & bpf_htons(VLAN_ID));
}

// Bytes of the first priority tags of a frame, at most MAX_PRIORITY_TAGS. In 64 bits: added to a pointer, the value must
// be known to the verifier, and those before Linux 5.16 lose 32 bits that the compiler has put on the stack.
static __always_inline __u64 priority_tags(void *data, void *end)
{
	for (__u64 length = 0; length < MAX_PRIORITY_TAGS * TAG_LENGTH; length += TAG_LENGTH) {
		struct ethhdr *eth = data + length;
		if ((void *)(eth + 1) > end || !is_priority_tag(eth, end))
			return length;
	}
	return MAX_PRIORITY_TAGS * TAG_LENGTH;
}

// Whether a packet is captured. Everything that isn't 0, PASS, is. `data` is the start of the frame, moved on by the
// length of its priority tags: EtherType and packet have their usual offsets from there. MAC addresses aren't read.
static __always_inline enum verdict captures(void *data, void *end, __u32 ifindex)
{
	struct ethhdr *eth = data;
	if ((void *)(eth + 1) > end)
		return 0;
	__u8 *l3 = (__u8 *)(eth + 1);

	if (eth->h_proto == bpf_htons(ETH_P_IP)) {
		if (l3 + 20 > (__u8 *)end)
			return 0;
		return captures4(l3, end, ifindex);
	}
	if (eth->h_proto == bpf_htons(ETH_P_IPV6)) {
		if (l3 + 40 > (__u8 *)end)
			return 0;
		// Neighbor solicitations and advertisements (ICMPv6 types 135 and 136) with a VIP as target.
		if (l3[6] == IPPROTO_ICMPV6 && l3 + 64 <= (__u8 *)end && (l3[40] == 135 || l3[40] == 136)) {
			struct v6 target;
			__builtin_memcpy(&target, l3 + 48, 16);
			if (is_resolved_by_socket(roles(bpf_map_lookup_elem(&hosts6, &target))))
				return 1;
		}
		return captures6(l3, end, ifindex);
	}
	if (eth->h_proto == bpf_htons(ETH_P_ARP)) {
		if (l3 + 28 > (__u8 *)end)
			return 0;
		__u32 sender, target;
		__builtin_memcpy(&sender, l3 + 14, 4);
		__builtin_memcpy(&target, l3 + 24, 4);
		return is_resolved_by_socket(roles(bpf_map_lookup_elem(&hosts4, &target)))
		    || is_resolved_by_socket(roles(bpf_map_lookup_elem(&hosts4, &sender)));
	}
	// A tag beyond the maximum: userspace drops the frame.
	return is_priority_tag(eth, end) ? CAPTURE : PASS;
}

// Removes tags of this length: moves the MAC addresses over them. Returns 0 on failure.
static __always_inline int remove_tags(struct xdp_md *ctx, __u64 length)
{
	__u8 macs[2 * ETH_ALEN];
	__u8 *data = (__u8 *)(long)ctx->data;
	if (!length)
		return 1;
	if (data + sizeof(macs) > (__u8 *)(long)ctx->data_end)
		return 0;
	__builtin_memcpy(macs, data, sizeof(macs));
	if (bpf_xdp_adjust_head(ctx, length))
		return 0;
	data = (__u8 *)(long)ctx->data;
	if (data + sizeof(macs) > (__u8 *)(long)ctx->data_end)
		return 0;
	__builtin_memcpy(data, macs, sizeof(macs));
	return 1;
}

SEC(XDP_SECTION)
int vipgate_steer(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u64 tags = priority_tags(data, end);
	enum verdict verdict = captures(data + tags, end, ctx->ingress_ifindex);
	if (verdict == PASS) {
		count(PASSED);
		return XDP_PASS;
	}
	if (verdict == HOLD) {
		count(HELD);
		return XDP_DROP;
	}
	__u32 interface = interface_id(ctx->ingress_ifindex);
	__u32 queue = ctx->rx_queue_index;
	int action = XDP_DROP;
	if (interface < INTERFACES && queue < QUEUES && remove_tags(ctx, tags))
		action = bpf_redirect_map(&sockets, interface * QUEUES + queue, XDP_DROP);
	count(action == XDP_REDIRECT ? CAPTURED : NO_SOCKET);
	return action;
}

// tc guard: a classifier at the ingress of the kernel's stack. Packets captured by the XDP program never reach it. If
// that program is detached or replaced, the guard drops the same packets, from the same maps, so that the kernel
// doesn't forward them untranslated.
#define HEADERS 128 // at least as many bytes as `captures` reads: Ethernet, two tags, IPv6 and 16 bytes of extension
                    // headers, ICMP, a quoted IPv6 header: 126; over IPv4, with options, 110
SEC("classifier")
int vipgate_guard(struct __sk_buff *skb)
{
	// The kernel has moved the outermost tag out of the frame. As in the XDP program, frames of VLANs pass.
	if (skb->vlan_present && (skb->vlan_tci & VLAN_ID))
		return TC_ACT_UNSPEC;
	__u32 length = skb->len < HEADERS ? skb->len : HEADERS;
	if ((void *)(long)skb->data + length > (void *)(long)skb->data_end)
		bpf_skb_pull_data(skb, length);
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	if (!captures(data + priority_tags(data, end), end, skb->ifindex))
		return TC_ACT_UNSPEC;
	count(GUARDED);
	return TC_ACT_SHOT;
}

// Some of the helpers require a GPL-compatible license.
char LICENSE[] SEC("license") = "GPL";
