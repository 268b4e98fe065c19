{{/* Names, labels and images. */}}

{{- define "tutti.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "tutti.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "tutti.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "tutti.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select a component's pods. Takes (list root component). */}}
{{- define "tutti.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "tutti.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* All labels. Takes (list root component). */}}
{{- define "tutti.labels" -}}
{{- $root := index . 0 -}}
{{ include "tutti.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: tutti
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The address of an image. Takes (list root image). */}}
{{- define "tutti.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- with $root.Values.images.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ default $root.Chart.AppVersion $image.tag }}{{ end -}}
{{- end -}}

{{- define "tutti.conductorImage" -}}
{{- $image := ternary .Values.images.cuda .Values.images.cpu (eq (include "tutti.device" .) "cuda") -}}
{{- include "tutti.image" (list . $image) -}}
{{- end -}}

{{- define "tutti.device" -}}
{{- default (ternary "cuda" "cpu" (gt (int .Values.conductor.gpus) 0)) .Values.conductor.device -}}
{{- end -}}

{{- define "tutti.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "tutti.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* The component whose pods clients reach. */}}
{{- define "tutti.front" -}}
{{- ternary "router" "conductor" .Values.router.enabled -}}
{{- end -}}

{{- define "tutti.clusterTokenSecret" -}}
{{- default (printf "%s-cluster-token" (include "tutti.fullname" .)) .Values.clusterToken.existingSecret -}}
{{- end -}}

{{- define "tutti.apiKeySecret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- .Values.apiKeys.existingSecret -}}
{{- else if or .Values.apiKeys.entries .Values.apiKeys.enabled -}}
{{- printf "%s-api-keys" (include "tutti.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* The secret with the key that the chart makes, if it makes one. */}}
{{- define "tutti.madeKeySecret" -}}
{{- $keys := .Values.apiKeys -}}
{{- if and $keys.enabled (not $keys.entries) (not $keys.existingSecret) -}}
{{- printf "%s-api-key" (include "tutti.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- define "tutti.publicTlsSecret" -}}
{{- default (printf "%s-tls" (include "tutti.fullname" .)) .Values.tls.public.secretName -}}
{{- end -}}

{{/* The secret with a part's certificate inside the cluster. Takes (list root part). */}}
{{- define "tutti.clusterTlsSecret" -}}
{{- $root := index . 0 -}}
{{- $cluster := $root.Values.tls.cluster -}}
{{- if eq $cluster.mode "secret" -}}
{{- index $cluster.secrets (index . 1) -}}
{{- else -}}
{{- printf "%s-%s-cluster-tls" (include "tutti.fullname" $root) (index . 1) -}}
{{- end -}}
{{- end -}}

{{/* True if parts of the release are connected over the network. */}}
{{- define "tutti.networked" -}}
{{- if or .Values.router.enabled (include "tutti.spans" .) -}}true{{- end -}}
{{- end -}}

{{/* True if the connections between parts of the release are encrypted. */}}
{{- define "tutti.clusterTls" -}}
{{- if and (include "tutti.networked" .) (ne .Values.tls.cluster.mode "none") -}}true{{- end -}}
{{- end -}}

{{/* True if a replica spans several pods. */}}
{{- define "tutti.spans" -}}
{{- if gt (int .Values.conductor.podsPerReplica) 1 -}}true{{- end -}}
{{- end -}}
