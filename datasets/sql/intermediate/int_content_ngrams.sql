-- int_content_ngrams: shared runs of words that hold no word of their question's family wording.
-- A run that only straddles the end of the wording ("... problem: 45 - 72") is mostly wording, so every
-- run that overlaps a wording run is left out; where a question has no wording, nothing is.
-- Grain: one row per training problem and position.
--   as in int_shared_ngrams
with marked as (
    select
        int_shared_ngrams.*,
        ngram in (select ngram from int_template_ngrams) as is_wording
    from int_shared_ngrams
),

wording as (
    select problem_id, list(start) as starts
    from marked
    where is_wording
    group by problem_id
),

final as (
    select marked.* exclude (is_wording)
    from marked
    cross join settings
    left join wording using (problem_id)
    where len(list_filter(coalesce(wording.starts, []), lambda start: abs(start - marked.start) < settings.ngram_words)) = 0
)

select * from final
