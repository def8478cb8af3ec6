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
{{/* At most 52 characters, for a CronJob. */}}
{{- define "vipgate.certificates" -}}{{ include "vipgate.fullname" . | trunc 39 | trimSuffix "-" }}-certificates{{- end -}}

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
{{- define "vipgate.gatewaySecret" -}}
{{- if eq .Values.tls.mode "secret" }}{{ .Values.tls.secret.gateways }}{{ else }}{{ include "vipgate.gateway" . }}-tls{{ end -}}
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

{{- define "vipgate.metricsAddress" -}}
{{- .Values.gateway.metrics.address | default (ternary "@HOST@" "127.0.0.1" .Values.monitoring.podMonitor.enabled) -}}
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
{{- $_ := merge $server (dict "ca" "/etc/vipgate/tls/ca.crt" "cert" "/etc/vipgate/tls/tls.crt" "key" "/etc/vipgate/tls/tls.key") -}}
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
{{- mergeOverwrite $config (deepCopy $values.gateway.config) (deepCopy (.gateway.config | default dict)) | toYaml -}}
{{- end -}}
