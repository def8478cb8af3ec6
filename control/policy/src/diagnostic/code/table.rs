//! The table of codes.

use super::Example;

codes! {
    /// The kind of mistake that a diagnostic is about. Displays as `VG0301`.
    ///
    /// Numbers are stable: they are in scripts, logs and documents. A code keeps its number and its meaning for ever; a
    /// new kind of mistake gets the next free number of its area, and the number of a removed one is not used again.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    #[repr(u16)]

    // VG01xx: YAML and single values.
    InvalidYaml = 101, "Not valid YAML",
        "The text can't be parsed as YAML 1.2, or a map has the same key twice. The document is not read, and after a \
         syntax error neither is the rest of the file. Mend the line; often an indentation, a bracket or a quote is \
         missing on the line before.",
        "gateway.yaml": "workers: {cores: [0, 1}" => "workers: {cores: [0, 1]}";
    AliasLimit = 102, "Aliases expand to too much",
        "The aliases (`*name`) of the file expand to more values or text than one file may have. The limit protects a \
         server from small files that take all of its memory. Write the values out, or split the file.";
    TooManyInvalidDocuments = 103, "Too many invalid documents",
        "More than 100 documents of the file are not valid YAML, so the rest of it is not read. The file is probably \
         not a YAML file at all. Mend the first errors and check again.";
    EmptyFile = 104, "Configuration file is empty",
        "The configuration file has no document, or only comments. A gateway needs at least `name`, `interfaces` and \
         `policy`, a policy server `source`. Check the path, and whether the file was written completely.";
    SeveralDocuments = 105, "More than one document",
        "A configuration file has exactly one document, so a line `---` between its fields is an error. Remove the \
         line. Manifests may have any number of documents, but they belong in files of their own.",
        "gateway.yaml": "zone: zone-1\n---\nnode: node-1" => "zone: zone-1\nnode: node-1";
    UnknownField = 106, "Unknown field",
        "vipgate has no field with this name here. An unknown field is an error in its configuration and in its own \
         kinds, since a misspelled field would silently have its default. The message lists the known fields. Correct \
         the name, or remove the field if it belongs to another version.",
        "gateway.yaml": "workers: {core: [0, 1]}" => "workers: {cores: [0, 1]}";
    MissingField = 107, "Required field is missing",
        "The field has no default and must be set. Often it is there, but at the wrong level of indentation. For \
         manifests, `apiVersion`, `kind` and `metadata.name` are always required.",
        "gateway.yaml": "peer: {port: 4790}" => "peer: {address: 192.0.2.11, port: 4790}";
    WrongType = 108, "Value of the wrong type",
        "The field needs another type of value, e.g. a list instead of a text, or a number instead of a map. The \
         message says what is expected and what was found. A field with nothing after its colon is `null`, which is \
         no map and no list.",
        "gateway.yaml": "workers: {cores: 2}" => "workers: {cores: [0, 1]}";
    TextNeedsQuotes = 109, "Text needs quotes",
        "YAML reads the value as a number or as true or false, but the field is a text. Put the value in quotes. \
         Typical are labels and annotations with the value `true` and names that are numbers.",
        "Service": "metadata: {name: s, annotations: {vipgate.io/egress: true}}"
            => "metadata: {name: s, annotations: {vipgate.io/egress: \"true\"}}";
    OutOfRange = 110, "Value out of range",
        "The value has the right type, but is lower or higher than the field permits. The message has the limits. \
         They come from protocols (a port has 16 bits) or protect the gateway from settings that can't work.",
        "gateway.yaml": "sessions: {capacity: 0}" => "sessions: {capacity: 65536}";
    UnknownValue = 111, "Unknown value",
        "The field takes one of a few words, and this isn't one of them. Case matters. The message lists the words.",
        "gateway.yaml": "xdp: {mode: nativ}" => "xdp: {mode: native}";
    NotExactlyOne = 112, "Exactly one alternative is required",
        "The field is a choice: it has exactly one of several subfields. None was set, or more than one. Keep the one \
         that is meant.",
        "gateway.yaml": "policy:\n  files: [.]\n  server: {url: \"http://127.0.0.1:18000\"}" => "policy:\n  files: [.]";
    MalformedValue = 113, "Malformed value",
        "The value is a text, but not of the form that its field needs: an address, a prefix without host bits, a \
         range in ascending order, a duration with a unit, a MAC address, a URL, or a label requirement whose \
         operator and values don't fit. The message says what to write.",
        "gateway.yaml": "pod_cidrs: [10.244.0.1/16]" => "pod_cidrs: [10.244.0.0/16]";
    EmptyValue = 114, "Empty value",
        "A list or text is there, but empty, and an empty one has no meaning here or would mean the opposite of what \
         it looks like. Fill it in, or omit the field to get its default.",
        "gateway.yaml": "workers: {cores: []}" => "workers: {cores: [0]}";
    DuplicateValue = 115, "Duplicate value",
        "The list has the same value twice. It would have no effect, and is probably a slip for another value. Remove \
         or correct one of the two.",
        "gateway.yaml": "workers: {cores: [0, 0]}" => "workers: {cores: [0, 1]}";
    InvalidName = 116, "Invalid name",
        "The name is empty, too long, or has whitespace or unprintable characters; that of an object may have no `/`, either. \
         Names appear in logs, metrics and protocols, so they are restricted there. Choose another one.",
        "gateway.yaml": "zone: zone 1" => "zone: zone-1";

    // VG02xx: configuration files.
    InterfaceRoles = 201, "An interface role is missing",
        "A gateway needs an interface to the pods (`inside`) and one to the clients (`outside`); one with the role \
         `both` is enough. Without one of the two it could translate nothing. Add the missing interface or change a \
         role.",
        "gateway.yaml": "interfaces: [{name: eth1, role: inside}]" => "interfaces: [{name: eth1, role: both}]";
    UnreachableAddress = 202, "Address can't be reached by others",
        "The address is unspecified, a loopback or a multicast address, but others must send packets to it: gateways, \
         nodes or a collector. Write the address of an interface in the network between them.",
        "gateway.yaml": "peer: {address: 127.0.0.1}" => "peer: {address: 192.0.2.11}";
    PrefixOfEverything = 203, "Prefix covers every address",
        "A prefix of length 0 as a prefix of pods or Services means that every address is inside the cluster. Then no \
         traffic would leave it, and nothing would be translated. Write the prefixes that your network plugin uses.",
        "gateway.yaml": "pod_cidrs: [0.0.0.0/0]" => "pod_cidrs: [10.244.0.0/16]";
    TlsWithoutHttps = 204, "TLS files without https",
        "`ca`, `cert` and `key` have no effect on a connection in plain text. The URL is probably meant to begin with \
         `https://`. Change the URL, or remove the files.",
        "gateway.yaml": "policy: {server: {url: \"http://127.0.0.1:18000\", ca: ca.pem}}"
            => "policy: {server: {url: \"http://127.0.0.1:18000\"}}";
    IncompleteKeyPair = 205, "Certificate or private key is missing",
        "A client certificate needs its private key, and the other way round. Set both `cert` and `key`, or neither.",
        "gateway.yaml": "policy: {server: {url: \"https://127.0.0.1:18000\", key: key.pem}}"
            => "policy: {server: {url: \"http://127.0.0.1:18000\"}}";
    AllowEmptyWithServer = 207, "allow_empty has no effect",
        "In gateway.yaml the field is about `policy.files`. With a policy server, the server decides whether an empty \
         source is an empty policy. Set `allow_empty` in policyd.yaml instead.",
        "gateway.yaml": "policy: {server: {url: \"http://127.0.0.1:18000\"}}\nallow_empty: true"
            => "policy: {server: {url: \"http://127.0.0.1:18000\"}}";
    AdminsWithoutClientCertificates = 208, "admins needs client certificates",
        "`admins` are names in client certificates, and the server asks for those only with `tls.ca`. Without it \
         nobody could be recognised as one of them. Set `tls.ca`, or remove `admins`; then only clients on the \
         server's host may administer it.",
        "policyd.yaml": "admins: [ops]" => "admins: []";
    EtcdOverTls = 209, "etcd with TLS is not supported",
        "This version speaks plain http with etcd. Run an etcd proxy on this host that speaks https with the members, \
         and use its http:// address; the message has the command.",
        "policyd.yaml": "source: {etcd: {endpoints: [\"https://10.0.0.1:2379\"]}}"
            => "source: {etcd: {endpoints: [\"http://127.0.0.1:2379\"]}}";
    SameTunnelPort = 210, "Two tunnels on one port",
        "`peer` and `overlay` have the same address and port. Both carry VXLAN, so packets of gateways and of nodes \
         could not be distinguished. Change one of the ports.",
        "gateway.yaml": "peer: {address: 192.0.2.11, port: 8472}\noverlay: {address: 192.0.2.11}"
            => "peer: {address: 192.0.2.11}\noverlay: {address: 192.0.2.11}";
    ReservedRoutingTable = 211, "Reserved routing table",
        "Linux keeps routing table 0 for itself and 255 for local addresses. Routes of VIPs there would be ignored or \
         would break the host. Use a dedicated table (default: 179) or main (254).",
        "gateway.yaml": "bgp: {table: 255}" => "bgp: {table: 179}";
    NoSuchInterface = 212, "Not an interface of this gateway",
        "A health target names an interface that isn't in `interfaces`. The gateway probes only through its own \
         interfaces. Correct the name, or add the interface.",
        "gateway.yaml": "health: {targets: [{interface: eth9, address: 192.0.2.1}]}"
            => "health: {targets: [{interface: eth0, address: 192.0.2.1}]}";
    PortRangeTooSmall = 213, "Too few SNAT ports",
        "SNAT ports are allocated in blocks of 64, and the range has no complete block. Each endpoint with sessions \
         needs at least one block. Widen the range.",
        "gateway.yaml": "ports: {range: 2000-2010}" => "ports: {range: 1024-65535}";
    InconsistentLimits = 214, "Limits contradict each other",
        "Two limits can't both hold: one is a part of the other, but larger. The message names both. Lower the first, \
         or raise the second.",
        "EgressPolicy": "spec: {serviceRef: {name: s}, limits: {sessionsPerEndpoint: 5, guaranteedPortsPerEndpoint: 6}}"
            => "spec: {serviceRef: {name: s}, limits: {sessionsPerEndpoint: 6, guaranteedPortsPerEndpoint: 5}}";
    TenancyWithServer = 215, "tenancy has no effect",
        "In gateway.yaml the field is about `policy.files`. With a policy server, the server compiles the policies of \
         all tenants. Set `tenancy` in policyd.yaml instead.",
        "gateway.yaml": "policy: {server: {url: \"http://127.0.0.1:18000\"}}\ntenancy: open"
            => "policy: {server: {url: \"http://127.0.0.1:18000\"}}";
    ContextWithoutKubeconfig = 216, "Context without kubeconfig",
        "`context` selects one of the contexts of a kubeconfig, and none is set: the server uses the service account of \
         its pod. Set `kubeconfig`, too, or remove `context`.",
        "policyd.yaml": "source: {kubernetes: {context: lab}}"
            => "source: {kubernetes: {kubeconfig: /etc/vipgate/kubeconfig, context: lab}}";
    TokensWithoutVerification = 217, "Tokens can't be verified",
        "Without `tls.ca` the server verifies no client, so the token of a service account would prove nothing. Set it, or \
         remove the tokens.",
        "policyd.yaml": "node_agents: {tokens: {namespace: vipgate, service_account: vipgate-node}}"
            => "node_agents: {}";

    // VG03xx: manifests, each by itself.
    NotAnObject = 301, "Not a Kubernetes object",
        "The document is a list or a single value instead of a map with `apiVersion`, `kind`, `metadata` and `spec`. \
         Perhaps the file is not a manifest. Several objects are documents between lines of `---`, or the `items` of \
         a `List`.";
    UnsupportedKind = 302, "Kind is not supported",
        "vipgate doesn't use this kind. In a dump of a cluster, other kinds are ignored with a warning; in the API \
         group `vipgate.io` an unknown kind is an error, since it is probably misspelled. The message lists the \
         supported kinds.",
        "AddressPool": "kind: AdressPool\nspec: {ranges: [203.0.113.0/28]}"
            => "kind: AddressPool\nspec: {ranges: [203.0.113.0/28]}";
    UnsupportedVersion = 303, "API version is not supported",
        "The kind is supported, but not in this version of its API. Write the version that the message has, or let \
         `kubectl get -o yaml` convert the object.",
        "EndpointSlice": "apiVersion: discovery.k8s.io/v1beta1\naddressType: IPv4\nendpoints: []"
            => "apiVersion: discovery.k8s.io/v1\naddressType: IPv4\nendpoints: []";
    TruncatedList = 304, "List is truncated",
        "The document has items, but not the kind of a List. `kubectl` prints the kind after the items, so the end of \
         the file is probably missing, and with it some objects. Write the file again, completely, then rename it \
         into place.";
    ClusterScoped = 305, "Kind has no namespace",
        "Objects of this kind are for the whole cluster and have no namespace. Kubernetes would reject the object, \
         too. Remove `metadata.namespace`.",
        "AddressPool": "metadata: {name: p, namespace: a}\nspec: {ranges: [203.0.113.0/28]}"
            => "metadata: {name: p}\nspec: {ranges: [203.0.113.0/28]}";
    UnknownAnnotation = 306, "Unknown annotation",
        "The annotation is in the group `vipgate.io`, but vipgate has none with this name here. It has no effect. It \
         is probably misspelled, or on the wrong kind of object.",
        "Service": "metadata: {name: s, annotations: {vipgate.io/egres: \"true\"}}"
            => "metadata: {name: s, annotations: {vipgate.io/egress: \"false\"}}";
    DuplicateObject = 307, "Object is defined twice",
        "Two documents have the same kind, namespace and name. Only one can be in force, and which one would be a \
         matter of chance. Remove or rename one of them; backups and editor copies in the directory are a frequent \
         cause.";
    PolicyWithoutPods = 308, "Policy names no pods",
        "An EgressPolicy names its pods by `serviceRef` (the endpoints of a Service) or by `selectors` (labels). This \
         one has neither. Add one of the two.",
        "EgressPolicy": "spec: {addresses: [203.0.113.10]}"
            => "spec: {selectors: [{podSelector: {}}], addresses: [203.0.113.10]}";
    PolicySourcesCombined = 309, "serviceRef can't be combined",
        "With `serviceRef` the Service defines both the pods and the VIPs. `selectors`, `addresses` and `pools` next \
         to it would contradict it. Keep `serviceRef`, or write the policy with `selectors`.",
        "EgressPolicy": "spec: {serviceRef: {name: s}, addresses: [203.0.113.10]}" => "spec: {serviceRef: {name: s}}";
    PolicyWithoutVips = 310, "Policy has no VIPs",
        "A policy with `selectors` needs the VIPs that its pods get as source: `addresses`, or `pools` to allocate \
         them from. Without VIPs all their traffic would be dropped.",
        "EgressPolicy": "spec: {selectors: [{podSelector: {}}]}"
            => "spec: {selectors: [{podSelector: {}}], addresses: [203.0.113.10]}";
    PoolWithoutAddresses = 311, "Pool has no addresses",
        "An AddressPool has `ranges` or a `provider`, and this one has neither. Nothing could be allocated from it. \
         Add a range.",
        "AddressPool": "spec: {ranges: []}" => "spec: {ranges: [203.0.113.0/28]}";
    OverlappingRanges = 312, "Address ranges overlap",
        "An address is in two ranges, of one pool or of two. It would have two announce modes and could be allocated \
         twice. Shorten one of the ranges.",
        "AddressPool": "spec: {ranges: [203.0.113.0/30, 203.0.113.2-203.0.113.9]}"
            => "spec: {ranges: [203.0.113.0/30, 203.0.113.4-203.0.113.9]}";
    SliceWithoutService = 313, "EndpointSlice of no Service",
        "The slice has no label `kubernetes.io/service-name`, so its endpoints belong to no Service. They are \
         ignored. Add the label if the slice was written by hand.",
        "EndpointSlice": "metadata: {name: s, labels: {}}\naddressType: IPv4\nendpoints: []"
            => "metadata: {name: s, labels: {kubernetes.io/service-name: s}}\naddressType: IPv4\nendpoints: []";
    HostNameEndpoints = 314, "Endpoints with host names",
        "Slices with the address type `FQDN` have names instead of addresses. A gateway resolves no names, so these \
         endpoints are ignored. Use addresses.",
        "EndpointSlice": "addressType: FQDN\nendpoints: []" => "addressType: IPv4\nendpoints: []";
    FamilyMismatch = 315, "Address of the other family",
        "An endpoint's address is not of the slice's `addressType`. Kubernetes has one slice per family. Move the \
         address to a slice of its family, or correct the type.",
        "EndpointSlice": "addressType: IPv4\nendpoints: [{addresses: [\"fd00::1\"]}]"
            => "addressType: IPv6\nendpoints: [{addresses: [\"fd00::1\"]}]";
    NotAPodAddress = 316, "Not an address of a pod",
        "The address is unspecified, a loopback, link-local, multicast or reserved address. No pod can be reached \
         there, so it can be neither backend nor covered endpoint. Correct the address.",
        "EndpointSlice": "addressType: IPv4\nendpoints: [{addresses: [127.0.0.1]}]"
            => "addressType: IPv4\nendpoints: [{addresses: [10.244.0.7]}]";
    FormerKind = 317, "Kind has another name now",
        "The kind `Gateway` of vipgate.io is `VipGateway` now, since Gateway API and Istio have a `Gateway`, too. The \
         former name is still read as the same kind. Write the new one; a later version will not read the former.",
        "VipGateway": "kind: Gateway\nspec: {zone: zone-1}" => "kind: VipGateway\nspec: {zone: zone-1}";
    ServiceRefNamespace = 318, "serviceRef with a namespace",
        "An EgressPolicy refers to a Service in its own namespace: its VIPs and pods are those of one tenant. A policy \
         for Services of any namespace is a ClusterEgressPolicy, which platform teams write. Remove `namespace`, or \
         change the kind.",
        "EgressPolicy": "spec: {serviceRef: {name: s, namespace: a}}" => "spec: {serviceRef: {name: s}}";
    ProviderField = 319, "Field doesn't fit the provider",
        "The addresses of a pool with `provider` are found by their tags and attached to one gateway each. So it has no \
         IPv4 ranges of its own and isn't announced by BGP, and some settings are only for some providers. The message \
         says which. Remove the field.",
        "AddressPool": "spec: {announce: BGP, provider: {aws: {region: eu-west-1, tags: {vipgate: public}}}}"
            => "spec: {provider: {aws: {region: eu-west-1, tags: {vipgate: public}}}}";

    // VG04xx: egress policies, VIPs and pools.
    NoSuchService = 401, "Service does not exist",
        "`serviceRef` names a Service that isn't among the manifests. The namespace is that of the policy. Correct \
         the name, or add the Service to what is checked: a check of single files doesn't see the others.";
    ServiceWithoutVip = 402, "Service has no egress VIP",
        "The Service can't be the source of VIPs: it has another type than `LoadBalancer`, belongs to another load \
         balancer class, or has no address in `status.loadBalancer.ingress` yet. The last is a warning, since the \
         address usually follows. In all three cases the traffic of its pods is dropped, also if they had a VIP before: \
         nothing leaves untranslated, and no earlier version of the Service stays in force.";
    NoPodSelected = 403, "Selector matches no pod",
        "No pod with an address has the labels of this selector. The policy may be there before its pods, so this is \
         a warning. Otherwise check labels and namespace: without `namespaceSelector` only the policy's namespace is \
         searched.";
    NoSuchPool = 404, "AddressPool does not exist",
        "`pools` names an AddressPool that isn't among the manifests. Without it the policy has no VIPs, and the \
         traffic of its pods is dropped. Correct the name, or add the pool.";
    PoolExhausted = 405, "Pool has too few free addresses",
        "The policy wants more VIPs of a family than the pool has left; addresses that Services or other policies use \
         are not free. It keeps what it has, and gets no part of the rest. Add a range to the pool, or lower `count`.";
    PoliciesOverlap = 406, "Two policies cover the same endpoints",
        "Some endpoints are covered by two policies, and only one can apply. An EgressPolicy precedes an annotation, \
         `serviceRef` precedes `selectors`, then the older one, then namespace and name. The message says which one applies and \
         why. Narrow one of the two if that is not what you mean.";
    NoVipOfFamily = 407, "Endpoints without a VIP of their family",
        "Pods have addresses of a family for which the policy has no VIP. Their traffic of that family is dropped, \
         since it would leave untranslated. Add a VIP of that family, or remove the addresses from the pods.";
    UnusableVip = 408, "Address can't be a VIP",
        "The address is unspecified, a loopback, link-local, multicast or reserved address. Remote hosts could not \
         reply to it. Choose a unicast address that the network routes to the gateways.",
        "EgressPolicy": "spec: {selectors: [{podSelector: {}}], addresses: [224.0.0.1]}"
            => "spec: {selectors: [{podSelector: {}}], addresses: [203.0.113.10]}";
    VipInUse = 409, "VIP is the address of a pod or node",
        "The address belongs to a gateway, or, outside of all pools, to a pod; where a policy names it there, to a node or \
         an endpoint. A VIP is answered by the gateways, so the other owner would lose its traffic. Choose an address that \
         nobody has.";
    VipOfTwoPolicies = 410, "VIP of two policies",
        "Two policies with `selectors` have the same address. Such a VIP belongs to one policy alone: the one that has it of \
         a pool, else the one with the higher precedence. Remove it from the other one, or merge the policies.";
    VipOfOtherNamespace = 411, "VIP of another namespace",
        "The policy uses the address of a Service of another namespace, or the Service one that a policy of another namespace \
         has of a pool. Remote hosts could no longer distinguish the tenants. Use an address of your own, or of a Service in \
         the policy's namespace.";
    HostAddress = 412, "Endpoint has the address of its host",
        "The endpoint is a pod on the host network, or a node. Its traffic is the node's, so the egress policy does \
         not apply to it; as a backend it works. Nothing is wrong if that is intended.";
    DuplicatePodAddress = 413, "Address of two pods",
        "Two pods have the same address, so one of the manifests is out of date. The one that isn't being deleted has \
         it, then the one that is ready and younger. Where that doesn't decide, neither has it: its traffic is dropped, \
         since it would leave with the VIP of another pod. Remove the other manifest.";
    PodsOfOtherNamespace = 414, "Selector is meant for others, too",
        "With `tenancy: strict` an EgressPolicy covers only pods of its own namespace, and its `namespaceSelector` may \
         select other namespaces. Their pods are not covered by it; the rest works. Pods of several namespaces are \
         covered by a ClusterEgressPolicy. Remove `namespaceSelector`.";
    PoolOfOtherNamespaces = 415, "Pool is not for this namespace",
        "With `tenancy: strict` only the namespaces that `spec.namespaces` of an AddressPool selects may have its \
         addresses. The policy or Service is in another one. Use another pool, or have the platform team add the \
         namespace to the pool or write a ClusterEgressPolicy.";
    AddressOutsidePools = 416, "VIP is in no AddressPool",
        "With `tenancy: strict` the VIPs of a policy are from AddressPools, or they are addresses of its own \
         namespace's Services. For any other address gateways would answer ARP in place of the host that has it. Add \
         the address to a pool, allocate one with `pools`, or set `tenancy: open` where all who write policies are \
         trusted.";
    SliceAddressOfOther = 417, "Slice has an address of others",
        "An EndpointSlice lists an address that isn't one of its own namespace: another pod has it, a host, or the \
         cluster. The address is ignored; the rest of the slice counts. With `tenancy: strict` this is checked against \
         Pods, so a slice that names a pod must name the one that has the address now. Correct the slice, or wait for \
         the controller that writes it.";
    AddressIsVip = 418, "Address is a VIP",
        "A Pod or Node names an address that is the VIP of a Service or policy. Gateways answer for it, so the address \
         of the Pod or Node is ignored. Give one of the two another address.";
    LimitExceeded = 419, "Limit is exceeded",
        "All objects together may take so much of a gateway's tables, and the objects of one namespace a share of it \
         (`namespace_share` of policyd.yaml). Older objects have it already, so this one is set aside: it is not in force, and nothing \
         else changes. The message names the limit. Delete what is no longer needed, or split the tenant; the page on \
         the security model lists all limits.";
    AddressQuarantined = 420, "Addresses are quarantined",
        "The addresses that could be given, or the one that the object names, were given up a short while ago. Former clients \
         may still know them, and firewalls may still trust them, so nobody but the former owner gets one from a pool, and \
         no other namespace by its name, before `reuseAfter` of the AddressPool has passed. Then it is given without further \
         ado. Wait, add a range, or lower `reuseAfter`.";
    NamespaceLimit = 421, "Namespace has its part of the pool",
        "The namespace has as many addresses of the pool as `maxPerNamespace` of the AddressPool allows. Those that it gave \
         up a short while ago count, too, until others may get them. What it has it keeps; this object gets nothing more. \
         Delete what is no longer needed, wait for the end of `reuseAfter`, or raise the limit.";
    AddressPending = 422, "Address is being recorded",
        "An address of a pool was chosen for the policy. It is in force once the record of addresses has it, so that a \
         restart or another policy server gives it to nobody else. That takes moments; if it lasts, the record can't be \
         written: see the log of the policy server.";

    // VG05xx: Services.
    PortConflict = 501, "Port of a VIP is used twice",
        "Two Services have the same VIP, protocol and port, or a Service's health check has the port of a frontend. \
         Only one can get the packets: the older Service keeps the port. Change one of the ports or VIPs.";
    AnnounceConflict = 502, "Services announce a VIP differently",
        "Services that share a VIP have different annotations `vipgate.io/announce`. A VIP is announced in one way. \
         Give both the same value, or put the VIP into an AddressPool.";
    AnnounceOverridden = 503, "Pool decides about announcement",
        "The VIP is in an AddressPool, whose announce mode takes precedence over the annotation of the Service. The \
         annotation has no effect. Remove it, or change the pool.";
    VipOfTwoNamespaces = 504, "VIP is shared by two namespaces",
        "Services of two namespaces have the same VIP. It works, but remote hosts and firewalls see two tenants as \
         one. Give each namespace a VIP of its own if they must be distinguished.";
    PortWithoutBackend = 505, "Port has no backend",
        "No endpoint slice of the Service has this port, so clients are rejected there. Ports are matched by name: \
         the name of the Service's port must be that of the slice, and both the same protocol.";
    VipWithoutBackend = 506, "VIP has no backend of its family",
        "The Service has an IPv4 and an IPv6 VIP, but endpoints of one family only. Clients of the other family are \
         rejected. Make the Service dual-stack, or remove the VIP.";
    MaglevTableTooSmall = 507, "Maglev table is too small",
        "The Service has more endpoints than its table can share sessions among evenly: less than 20 slots for each. \
         Some backends would get a tenth more than others. Set the annotation `vipgate.io/maglev-table-size` to a \
         prime of at least the number in the message.";
    BackendIsVip = 508, "Backend is a VIP",
        "An endpoint of the Service has the address of a VIP, so its packets would come back to the gateway. It is \
         ignored. Correct the slice: it lists the addresses of pods.";
    HealthCheckPortConflict = 509, "Health check port is used twice",
        "Two Services have the same `healthCheckNodePort`. It listens on the gateway's own addresses, too, so it must \
         be unique. The older Service keeps it. Change the port of the other one.";
    HealthCheckPortUnused = 510, "Health check port has no effect",
        "`healthCheckNodePort` is for Services with `externalTrafficPolicy: Local`, whose gateways may have no local \
         backend. This Service has the policy `Cluster`. Set `Local`, or remove the port.",
        "Service": "spec: {type: LoadBalancer, healthCheckNodePort: 30000}"
            => "spec: {type: LoadBalancer, healthCheckNodePort: 30000, externalTrafficPolicy: Local}";
    ServiceTooLarge = 511, "Service is too large",
        "The Service has more ports, source ranges or backends than fit into one update for a gateway. Split it into \
         several Services, which may share the VIP.";

    // VG06xx: gateways and nodes.
    NoSuchGateway = 601, "Gateway does not exist",
        "`gateways.names` of a policy has a name without VipGateway manifest. The policy uses the other ones. Correct \
         the name, or add the manifest.";
    NoGatewaySelected = 602, "Selector matches no gateway",
        "No VipGateway manifest has the labels of `gateways.selector`. No gateway is eligible, so the traffic of the \
         policy's endpoints is dropped. Check the labels of both.";
    NoPeerAddress = 603, "Gateway has no peer address",
        "Gateways of a group exchange packets and sessions, so each needs an address for the others. The manifest has \
         none; the gateway is reachable only if its own configuration has `peer.address`. Set `spec.peerAddress`, \
         too.";
    DuplicatePeerAddress = 604, "Two gateways with one peer address",
        "Two VipGateway manifests have the same `spec.peerAddress`. Packets for one would reach the other. Correct one \
         of the two.";
    NoEligibleGateway = 605, "No gateway for VIPs",
        "A Service or policy has VIPs that no eligible gateway owns: `gateways` permits none, or all are at \
         `maxAddresses`. Nobody announces such a VIP. The traffic of endpoints that have no other VIP is dropped. \
         Permit more gateways, or raise the limit.";
    NoGatewayInZone = 606, "No gateway in the zone",
        "`zoneAffinity: Require` wants a gateway in the zone of each endpoint, and there is none for some. Their \
         traffic is dropped. Add a gateway there, or use `Prefer`.";
    NodeConflict = 607, "Two nodes with one address or prefix",
        "Two OverlayNode manifests have the same tunnel address or the same prefix of pods. Packets for one would \
         reach the other. Correct one of the two. The same holds for Node manifests if nodes run the agent.";
    NodeWithoutAddress = 608, "Node has no internal address",
        "Nodes run the agent (`node_agents` of the policy server), and this one's manifest has no address of type \
         InternalIP that gateways can reach. So it has no tunnels, and gets no policy. Kubernetes sets the address when \
         the node has registered; with `--node-ip` of the kubelet it can be chosen.";

    // VG07xx: files, certificates and sources.
    Unreadable = 701, "Can't be read",
        "The file, directory or key is missing, can't be read by this user, is no regular file, too long or not \
         UTF-8; a key in etcd may also hold an object of another name. The message has the reason of the operating \
         system. Check path and permissions; relative paths are relative to the current directory.";
    InvalidTlsFile = 702, "Not a certificate or key in PEM",
        "The file can be read, but has no certificate or no private key in PEM. Perhaps it is in DER, encrypted, or \
         the two files are swapped. Convert it with `openssl`.";
    UnusableCertificate = 703, "Certificate can't be used",
        "The TLS library rejects the certificate or the key; most often the key doesn't belong to the certificate. \
         Compare their public keys, and issue the certificate again if they differ.";
    CertificateValidity = 704, "Certificate is not valid now",
        "The certificate has expired, or is not valid yet. Peers will reject it. Renew it; the process reads the new \
         file at the next connection. Check the clock, too.";
    CertificateName = 705, "Certificate of another name",
        "A policy server with `tls.ca` accepts a gateway only under the names in its certificate, and `name` isn't \
         one of them. The connection will be rejected. Issue a certificate for this name, or correct `name`.";
    NoSystemAuthorities = 706, "System has no CA certificates",
        "Without `ca` the certificates of the system are used, and it has none. No server could be verified. Install \
         the package `ca-certificates`, or set `ca`.";
    SourceUnavailable = 707, "Part of the source is empty or missing",
        "A running gateway or policy server found a file, directory or prefix empty or missing that had objects \
         before. They stay in force, since a lost mount must not remove the policy. Restore it, or accept that it is \
         empty with `vipgate policy accept-empty`.";
}
