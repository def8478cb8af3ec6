{{- define "vipgate.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 48 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "vipgate.policyd" -}}{{ include "vipgate.fullname" . }}-policyd{{- end -}}
{{- define "vipgate.gateway" -}}{{ include "vipgate.fullname" . }}-gateway{{- end -}}
{{- define "vipgate.node" -}}{{ include "vipgate.fullname" . }}-node{{- end -}}
{{/* At most 52 characters, for a CronJob. */}}
{{- define "vipgate.certificates" -}}{{ include "vipgate.fullname" . | trunc 39 | trimSuffix "-" }}-certificates{{- end -}}

{{/* Affinity to nodes without a gateway: root there can read what pods on the node can. */}}
{{- define "vipgate.apartFromGateways" -}}
preferredDuringSchedulingIgnoredDuringExecution:
  - weight: 100
    preference:
      matchExpressions:
        {{- range $label, $_ := .Values.gateway.nodeSelector }}
        - {key: {{ $label }}, operator: DoesNotExist}
        {{- end }}
{{- end -}}

{{- define "vipgate.serviceAccount" -}}
{{- .Values.policyd.serviceAccount.name | default (ternary (include "vipgate.policyd" .) "default" .Values.policyd.serviceAccount.create) -}}
{{- end -}}

{{- define "vipgate.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "vipgate.policydImage" -}}
{{- if .Values.policyd.imageTag }}{{ .Values.image.repository }}:{{ .Values.policyd.imageTag }}{{ else }}{{ include "vipgate.image" . }}{{ end -}}
{{- end -}}

{{/* Labels that select the pods of a component: (dict "root" $ "component" NAME). */}}
{{- define "vipgate.selectorLabels" -}}
app.kubernetes.io/name: {{ .root.Values.nameOverride | default .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of an object of a component. */}}
{{- define "vipgate.labels" -}}
{{ include "vipgate.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{/* Names of Secrets. */}}
{{- define "vipgate.policydSecret" -}}
{{- if eq .Values.tls.mode "secret" }}{{ .Values.tls.secret.policyd }}{{ else }}{{ include "vipgate.policyd" . }}-tls{{ end -}}
{{- end -}}
{{/* Of gateways and agents of nodes. */}}
{{- define "vipgate.clientsSecret" -}}
{{- if eq .Values.tls.mode "secret" }}{{ .Values.tls.secret.clients }}{{ else }}{{ include "vipgate.fullname" . }}-clients-tls{{ end -}}
{{- end -}}
{{- define "vipgate.tunnelSecret" -}}
{{- if eq .Values.tls.mode "secret" }}{{ .Values.tls.secret.tunnels }}{{ else }}{{ include "vipgate.node" . }}-tunnels{{ end -}}
{{- end -}}

{{/* Whether nodes run the agent: the release's policy server knows the nodes and verifies their tokens by the API. */}}
{{- define "vipgate.hasNodes" -}}
{{- and .Values.node.enabled .Values.policyd.enabled (not (hasKey .Values.policyd.config "source")) -}}
{{- end -}}

{{/* Whether the policy server verifies tokens of pods. */}}
{{- define "vipgate.verifiesTokens" -}}
{{- and (ne .Values.tls.mode "none") (or .Values.gateway.enabled (eq (include "vipgate.hasNodes" .) "true")) -}}
{{- end -}}

{{/* Volumes of a client of the policy server: its CA bundle, and the token of the pod. */}}
{{- define "vipgate.clientVolumes" -}}
- name: ca
  secret:
    secretName: {{ include "vipgate.clientsSecret" . }}
    items: [{key: ca.crt, path: ca.crt}]
- name: token
  projected:
    sources:
      - serviceAccountToken: {path: token, audience: vipgate, expirationSeconds: 3600}
{{- end -}}

{{/* Whether there can be several policy servers: not with files as source, since each would be a membership authority of its own. */}}
{{- define "vipgate.isReplicated" -}}
{{- not (hasKey (.Values.policyd.config.source | default dict) "files") -}}
{{- end -}}

{{/* DNS names of the policy server, as a YAML list. With localhost, so that its own command line reaches it while it isn't ready. */}}
{{- define "vipgate.policydNames" -}}
{{- $name := include "vipgate.policyd" . -}}
- {{ $name }}.{{ .Release.Namespace }}.svc
- {{ $name }}.{{ .Release.Namespace }}.svc.cluster.local
- localhost
{{- end -}}

{{- define "vipgate.serverUrl" -}}
{{- if .Values.gateway.serverUrl -}}
{{- .Values.gateway.serverUrl -}}
{{- else -}}
{{- if not .Values.policyd.enabled }}{{ fail "gateway.serverUrl is required without policyd.enabled" }}{{ end -}}
{{ ternary "http" "https" (eq .Values.tls.mode "none") }}://{{ include "vipgate.policyd" . }}.{{ .Release.Namespace }}.svc:18000
{{- end -}}
{{- end -}}

{{/* Address of the policy server's metrics: the loopback, unless somebody is to read them. */}}
{{- define "vipgate.policydMetricsAddress" -}}
{{- $isRead := or .Values.monitoring.serviceMonitor.enabled .Values.policyd.networkPolicy.metricsFrom -}}
{{- .Values.policyd.metrics.address | default (ternary .Values.policyd.bindAddress "127.0.0.1" (not (empty $isRead))) -}}
{{- end -}}

{{/* A probe of the policy server: (dict "root" $ "path" PATH). */}}
{{- define "vipgate.policydProbe" -}}
{{- $address := include "vipgate.policydMetricsAddress" .root -}}
{{- if eq (include "vipgate.isLoopback" $address) "true" -}}
# Kubelet doesn't reach the pod's loopback.
exec:
  command:
    - /bin/bash
    - -ec
    - |
      exec 3<>/dev/tcp/{{ $address }}/9470
      printf 'GET {{ .path }} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n' >&3
      read -r _ status _ <&3
      [ "$status" = 200 ]
{{- else -}}
httpGet: {port: metrics, path: {{ .path }}}
{{- end -}}
{{- end -}}

{{- define "vipgate.isLoopback" -}}{{ or (hasPrefix "127." .) (eq . "::1") }}{{- end -}}

{{/* node.yaml; @NODE@ and @HOST@ are replaced on each node. */}}
{{- define "vipgate.nodeYaml" -}}
{{- $node := .Values.node -}}
{{- $server := dict "url" (include "vipgate.serverUrl" .) "cache" "/var/lib/vipgate/node.cache" -}}
{{- if ne .Values.tls.mode "none" -}}
{{- $_ := merge $server (dict "ca" "/etc/vipgate-tls/ca.crt" "token" "/var/run/secrets/vipgate/token") -}}
{{- end -}}
{{- $config := dict
  "name" "@NODE@"
  "server" $server
  "pod_cidrs" $node.podCIDRs
  "state" "/run/vipgate/node.marks"
  "sysctls" "/host/proc/sys/net"
  "admin" (dict "socket" "/run/vipgate/node.sock")
  "metrics" (dict "listen" (printf "%s:9471" (include "vipgate.host" (include "vipgate.metricsAddress" .))))
  "log" (dict "format" "json") -}}
{{- mergeOverwrite $config (deepCopy $node.config) | toYaml -}}
{{- end -}}

{{- define "vipgate.metricsAddress" -}}
{{- .Values.gateway.metrics.address | default (ternary "@HOST@" "127.0.0.1" .Values.monitoring.podMonitor.enabled) -}}
{{- end -}}

{{/* `host: ADDRESS, ` of a probe if metrics are on the loopback: kubelet's default is the pod's address, the node's. */}}
{{- define "vipgate.probeHost" -}}
{{- $address := include "vipgate.metricsAddress" . -}}
{{- if eq (include "vipgate.isLoopback" $address) "true" }}host: {{ $address | quote }}, {{ end -}}
{{- end -}}

{{/* An address in front of a port: IPv6 in brackets. */}}
{{- define "vipgate.host" -}}
{{- if contains ":" . }}[{{ . }}]{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* gateway.yaml of a gateway: (dict "root" $ "gateway" ENTRY), or of all others: an empty ENTRY. */}}
{{- define "vipgate.gatewayYaml" -}}
{{- $values := .root.Values -}}
{{- $server := dict "url" (include "vipgate.serverUrl" .root) "cache" "/var/lib/vipgate/policy.cache" -}}
{{- if ne $values.tls.mode "none" -}}
{{- $_ := merge $server (dict "ca" "/etc/vipgate-tls/ca.crt" "token" "/var/run/secrets/vipgate/token") -}}
{{- end -}}
{{- $config := dict
  "name" "@NODE@"
  "interfaces" $values.gateway.interfaces
  "policy" (dict "server" $server)
  "sessions" (dict "state" "/dev/shm/vipgate")
  "peer" (dict "address" (.gateway.peerAddress | default "@ADDRESS@") "port" $values.gateway.peerPort)
  "admin" (dict "socket" "/run/vipgate/gateway.sock")
  "metrics" (dict "listen" (printf "%s:9469" (include "vipgate.host" (include "vipgate.metricsAddress" .root))))
  "log" (dict "format" "json") -}}
{{- with .gateway.zone }}{{ $_ := set $config "zone" . }}{{ end -}}
{{- if eq (include "vipgate.hasNodes" .root) "true" }}
{{- $address := .gateway.overlayAddress | default .gateway.peerAddress | default "@ADDRESS@" }}
{{- $_ := set $config "overlay" (dict "address" $address "port" $values.node.port) }}
{{- end -}}
{{- mergeOverwrite $config (deepCopy $values.gateway.config) (deepCopy (.gateway.config | default dict)) | toYaml -}}
{{- end -}}
